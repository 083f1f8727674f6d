"""`inflight cache`: inspects and manages a prefix store."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.help import Command, Group
from inflight.cli.options import engine_options, engine_values, model_option, quiet_libraries, size
from inflight.cli.structure import in_bytes
from inflight.contracts.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from inflight.prefix_store.archive import ArchiveTotals
    from inflight.prefix_store.inspection import StoredFingerprint

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
FINGERPRINT = click.option("--fingerprint", default="", help="Only blocks of fingerprints that begin so.")
WIDTH = 160
"""Of a table, in columns; a narrower terminal breaks its lines."""
SECONDS_OF_A_DAY = 86_400.0


@click.group(cls=Group)
def cache() -> None:
    """Manage a prefix store.

    The folder of --prefix-cache-dir: blocks of the cache in files, of any number of models.
    """


@cache.command(name="list", cls=Command)
@FOLDER
def list_(folder: Path) -> None:
    """Print the prefixes in FOLDER by model: size, hits and times of use."""
    from rich.console import Console
    from rich.table import Table

    from inflight.prefix_store.inspection import stored_fingerprints

    table, now = Table(box=None), time.time()
    for heading in ("fingerprint", "model", "runs in"):
        table.add_column(heading)
    for heading in ("blocks", "tokens", "size", "pinned", "hits", "used"):
        table.add_column(heading, justify="right")
    for each in stored_fingerprints(folder):
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
            in_bytes(each.num_pinned_bytes),
            f"{each.num_hits:,}",
            used,
        )
    Console(highlight=False, width=WIDTH).print(table)


@cache.command(cls=Command)
@FOLDER
@click.option("--delete", is_flag=True, help="Delete damaged files.")
def verify(folder: Path, delete: bool) -> None:
    """Read every block in FOLDER, and list damaged ones. (Engines check each block they load.)"""
    from inflight.prefix_store.inspection import damaged, stored_fingerprints

    found = stored_fingerprints(folder)
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
@FINGERPRINT
@click.option("--unused-days", type=click.FloatRange(min=0), default=0.0, help="Only blocks unused for this long.")
@click.option("--keep-pinned", is_flag=True, help="Only unpinned prefixes.")
def clear(folder: Path, fingerprint: str, unused_days: float, keep_pinned: bool) -> None:
    """Delete the blocks in FOLDER. Running engines recompute missing blocks."""
    from inflight.prefix_store import inspection

    used_before = time.time() - unused_days * SECONDS_OF_A_DAY
    cleared = [inspection.clear(each, used_before, keep_pinned=keep_pinned) for each in _stored_of(folder, fingerprint)]
    print(f"{sum(each for each, _ in cleared):,} blocks deleted, {in_bytes(sum(each for _, each in cleared))}")


@cache.command(cls=Command)
@FOLDER
@click.argument("prompts", nargs=-1)
@click.option("--file", "-f", "files", type=click.Path(path_type=Path), multiple=True, help="A file that is a prompt.")
@model_option
@engine_options
def warm(folder: Path, prompts: tuple[str, ...], files: tuple[Path, ...], model: str | None, **options: Any) -> None:
    """Compute PROMPTS, such as a system prompt, and pin them in FOLDER: engines with the same options load them, and
    they are never evicted."""
    if options["prefix_cache_dir"] is not None:
        raise click.UsageError("FOLDER is the prefix store: leave out --prefix-cache-dir")
    if not prompts and not files:
        raise click.UsageError("give a prompt, or --file")
    quiet_libraries()
    from inflight import LLM

    texts = [*prompts, *(path.read_text(encoding="utf-8-sig") for path in files)]
    llm = LLM(model, **{**engine_values(options), "prefix_cache_dir": str(folder)})
    for text in texts:
        try:
            print(f"{llm.cache_prefix(text):,} tokens kept of {text[:40]!r}")
        except OSError as error:
            raise click.ClickException(f"{text[:40]!r} is not kept: {error}") from error


@cache.command(cls=Command)
@FOLDER
@click.argument("archive", type=click.Path(path_type=Path))
@FINGERPRINT
@click.option("--pinned", is_flag=True, help="Only pinned prefixes.")
def export(folder: Path, archive: Path, fingerprint: str, pinned: bool) -> None:
    """Write the prefixes in FOLDER to the file ARCHIVE, for `import` into another folder.

    Prefixes under a cache salt are left out: only requests with the salt find them.
    """
    from inflight.prefix_store.archive import write_archive

    found = _stored_of(folder, fingerprint)
    partial = archive.with_name(f"{archive.name}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            moved = write_archive(folder, found, file, only_pinned=pinned)
        os.replace(partial, archive)
    except OSError as error:
        raise click.ClickException(f"{str(archive)!r} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    _print_moved(moved, "exported")


@cache.command("import", cls=Command)
@FOLDER
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--prefix-cache-size", type=size, default="20G", show_default=True, help="Bytes that FOLDER may have.")
def import_(folder: Path, archive: Path, prefix_cache_size: int) -> None:
    """Add the prefixes in the file ARCHIVE to FOLDER, which is created if missing.

    Its contents affect a model's output: import only archives from people you trust.
    """
    from inflight.prefix_store.archive import read_archive

    if not archive.is_file():
        raise InvalidRequestError(f"there is no file {str(archive)!r}")
    if archive.stat().st_size > prefix_cache_size:
        raise InvalidRequestError(f"{str(archive)!r} is larger than --prefix-cache-size")
    with archive.open("rb") as file:
        try:
            moved = read_archive(file, folder, prefix_cache_size)
        except ValueError as error:
            raise InvalidRequestError(f"{str(archive)!r}: {error}") from error
        except OSError as error:
            raise click.ClickException(f"{str(archive)!r} cannot be added to {str(folder)!r}: {error}") from error
    _print_moved(moved, "imported")


def _stored_of(folder: Path, fingerprint: str) -> "list[StoredFingerprint]":
    from inflight.prefix_store.inspection import stored_fingerprints

    return [each for each in stored_fingerprints(folder) if each.fingerprint.startswith(fingerprint)]


def _print_moved(moved: "ArchiveTotals", verb: str) -> None:
    damaged = f"; {moved.num_damaged:,} are damaged and left out" if moved.num_damaged else ""
    blocks = "block" if moved.num_blocks == 1 else "blocks"
    print(f"{moved.num_blocks:,} {blocks} {verb}, {in_bytes(moved.num_bytes)}{damaged}")


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
