"""`inflight race`: the same requests through static waves, padded and ragged batches, and the engine, side by side."""

import sys
from pathlib import Path
from typing import Any

import click

from inflight.cli.options import config_options, engine_values, quiet_libraries
from inflight.demo_model import DEMO_MODEL

METHODS = ("static", "padded", "ragged", "engine")


@click.command()
@click.option("--model", "-m", default=str(DEMO_MODEL), show_default="the small embedded one", help="Hub id or folder.")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=24, help="Requests to run.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=120, help="Most tokens for the longest requests.")
@click.option("--seed", type=int, default=0, help="Of the requests' prompts and lengths.")
@click.option("--method", "names", type=click.Choice(METHODS), multiple=True, help="Only these; may be repeated.")
@click.option("--verbose", "-v", is_flag=True, help="Tell who takes which slot, and when, on standard error.")
@click.option("--html", type=Path, help="Write timelines and table as one self-contained page.")
@click.option("--png", type=Path, help="Write the timelines as a picture.")
@config_options
def race(
    model: str,
    num_requests: int,
    max_tokens: int,
    seed: int,
    names: tuple[str, ...],
    verbose: bool,
    html: Path | None,
    png: Path | None,
    **options: Any,
) -> None:
    """The same requests of mixed lengths through every method: live, then a timeline of the slots and a table.

    Every request runs to its own cap, on random prompts; in float32 unless another dtype is asked for, so that all
    methods give the same tokens.
    """
    quiet_libraries()
    from rich.console import Console

    from inflight.contracts.config import EngineConfig
    from inflight.lessons.methods import Setting
    from inflight.lessons.race import mixed_requests, run_race, write_html, write_png

    setting = Setting(model, EngineConfig(**{"max_num_seqs": 8, "dtype": "float32", **engine_values(options)}))
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
