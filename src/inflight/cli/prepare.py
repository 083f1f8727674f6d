"""`inflight prepare MODEL`: prepares a model ahead of its first start."""

import time
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_options, engine_values, model_argument, quiet_libraries


@click.command(cls=Command)
@model_argument
@engine_options
def prepare(model: str | None, **options: Any) -> None:
    """Load a model once, so that later starts are faster. MODEL means the same as --model MODEL.

    This builds the kernels if they are missing, proves the model, and caches the result in ~/.cache/inflight, for the
    same files and options on this machine."""
    quiet_libraries()
    from inflight import LLM

    start = time.monotonic()
    info = LLM(model, **engine_values(options)).model_info
    seconds = time.monotonic() - start
    click.echo(
        f"{info.model_class} is ready after {seconds:.1f} s: it runs {info.executor}, proved on {info.proved_on}"
    )
