"""`inflight cache`: what is in a folder of prefixes."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command, Group
from inflight.cli.options import engine_options, engine_values, model_option, quiet_libraries
from inflight.cli.words import in_bytes

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
SECONDS_OF_A_DAY = 86_400.0


@click.group(cls=Group)
def cache() -> None:
    """Look after a folder of prefixes.

    That is what --prefix-cache-dir names: blocks of the cache in files, of any number of models.
    """


@cache.command(name="list", cls=Command)
@FOLDER
def list_(folder: Path) -> None:
    """Print whose prefixes are in FOLDER, how much they take, and when they were used."""
    from rich.console import Console
    from rich.table import Table

    from inflight.prefix_store.inspection import holdings

    table, now = Table(box=None), time.time()
    for heading in ("fingerprint", "model", "runs in", "blocks", "tokens", "size", "used"):
        table.add_column(heading, justify="right" if heading in ("blocks", "tokens", "size") else "left")
    for each in holdings(folder):
        about, model = each.about, str(each.about.get("model", "unknown"))
        runs_in = " ".join(str(about[key]) for key in ("quantization", "dtype") if about.get(key))
        num_tokens = each.num_blocks * about.get("block_size", 0) // max(1, about.get("groups", 1))
        used = f"{_ago(now - each.last_used)} ago" if each.num_blocks else "never"
        table.add_row(
            each.fingerprint[:12],
            model.rpartition(os.sep)[2] if os.path.isabs(model) else model,
            runs_in,
            f"{each.num_blocks:,}",
            f"{num_tokens:,}",
            in_bytes(each.num_bytes),
            used,
        )
    Console(highlight=False).print(table)


@cache.command(cls=Command)
@FOLDER
@click.option("--delete", is_flag=True, help="Delete what is damaged.")
def verify(folder: Path, delete: bool) -> None:
    """Read every block in FOLDER, and name those that are damaged. Engines do that themselves when they use one."""
    from inflight.prefix_store.inspection import damaged, holdings

    found = holdings(folder)
    num_damaged = 0
    for holding in found:
        for path, reason in damaged(holding):
            num_damaged += 1
            print(f"{path} {reason}")
            if delete:
                path.unlink(missing_ok=True)
    print(f"{sum(each.num_blocks for each in found):,} blocks, {num_damaged:,} damaged", file=sys.stderr)
    if num_damaged and not delete:
        sys.exit(1)


@cache.command(cls=Command)
@FOLDER
@click.option("--fingerprint", default="", help="Only blocks of fingerprints that begin so.")
@click.option("--unused-days", type=click.FloatRange(min=0), default=0.0, help="Only what was not used for so long.")
def clear(folder: Path, fingerprint: str, unused_days: float) -> None:
    """Delete the blocks in FOLDER. Engines that run compute again what they miss."""
    from inflight.prefix_store.inspection import clear as run
    from inflight.prefix_store.inspection import holdings

    used_before = time.time() - unused_days * SECONDS_OF_A_DAY
    cleared = [run(each, used_before) for each in holdings(folder) if each.fingerprint.startswith(fingerprint)]
    print(f"{sum(each for each, _ in cleared):,} blocks deleted, {in_bytes(sum(each for _, each in cleared))}")


@cache.command(cls=Command)
@FOLDER
@click.argument("prompts", nargs=-1)
@click.option("--file", "-f", "files", type=click.Path(path_type=Path), multiple=True, help="A file that is a prompt.")
@model_option
@engine_options
def warm(folder: Path, prompts: tuple[str, ...], files: tuple[Path, ...], model: str | None, **options: Any) -> None:
    """Compute PROMPTS, such as a system prompt, and keep them in FOLDER, from where engines with the same options
    restore them."""
    if options["prefix_cache_dir"] is not None:
        raise click.UsageError("FOLDER is where prefixes are kept: leave out --prefix-cache-dir")
    if not prompts and not files:
        raise click.UsageError("give a prompt, or --file")
    quiet_libraries()
    from inflight import LLM

    texts = [*prompts, *(path.read_text(encoding="utf-8") for path in files)]
    llm = LLM(model, **{**engine_values(options), "prefix_cache_dir": str(folder)})
    for text in texts:
        print(f"{llm.cache_prefix(text):,} tokens kept of {text[:40]!r}")


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
