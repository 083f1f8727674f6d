"""`inflight info MODEL`: shows what preparation found out about a model, and how it will run."""

import json
from dataclasses import asdict
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_options, engine_values, model_argument, quiet_libraries


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@model_argument
@engine_options
def info(model: str | None, as_json: bool, **options: Any) -> None:
    """Load a model, prove it, and print what was found. MODEL means the same as --model MODEL."""
    quiet_libraries()
    from rich.console import Console
    from rich.table import Table

    from inflight.llm import LLM

    found = asdict(LLM(model, **engine_values(options)).model_info)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        lines = value if isinstance(value, tuple) else (value,)
        table.add_row(name, "\n".join(f"{line:.1e}" if isinstance(line, float) else str(line) for line in lines))
    Console().print(table)
