"""`inflight race`: runs the same requests through static waves, padded and ragged batches, and the engine."""

import sys
from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import config_options_with, engine_values, model_option, quiet_libraries

DEFAULTS = {"max_num_seqs": 8, "dtype": "float32"}
METHODS = ("static", "padded", "ragged", "engine")


@click.command(cls=Command)
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=24, help="Requests to run.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=120, help="Most tokens for the longest requests.")
@click.option("--seed", type=int, default=0, help="Seed of prompts and lengths.")
@click.option(
    "--method", "names", type=click.Choice(METHODS), multiple=True, help="Run only this one; may be repeated."
)
@click.option("--verbose", "-v", is_flag=True, help="Log which request takes which slot.")
@click.option("--html", type=Path, help="Write timelines and table as one self-contained page.")
@click.option("--png", type=Path, help="Write the timelines as a picture.")
@model_option
@config_options_with(**DEFAULTS)
def race(
    model: str | None,
    num_requests: int,
    max_tokens: int,
    seed: int,
    names: tuple[str, ...],
    verbose: bool,
    html: Path | None,
    png: Path | None,
    **options: Any,
) -> None:
    """Run the same requests through static waves, padded and ragged batches, and the engine.

    They are shown live, then as timelines of the slots and a table. Prompts are random, and every request runs to its
    own limit. The default dtype is float32, so that all methods give the same tokens.
    """
    quiet_libraries()
    from rich.console import Console

    from inflight.contracts.config import EngineConfig
    from inflight.lessons.methods import Setting
    from inflight.lessons.race import mixed_requests, run_race, write_html, write_png
    from inflight.sources import model_source

    setting = Setting(model_source(model), EngineConfig(**{**DEFAULTS, **engine_values(options)}))
    methods = {name: method for name, method in setting.methods.items() if not names or name in names}
    requests = mixed_requests(num_requests, max_tokens, setting.engine.model_info.vocab_size, seed)
    console = Console()
    log = (lambda line: print(line, file=sys.stderr)) if verbose else None
    result = run_race(methods, requests, setting.num_slots, console, log)
    console.print(result)
    if html:
        write_html(result, html)
    if png:
        write_png(result, png)
