"""`inflight profile MODEL`: shows where a decode step's time goes, beside this machine's roofline."""

from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import (
    choice_options,
    config_options_with,
    engine_values,
    model_argument,
    quiet_libraries,
    sampling_values,
)
from inflight.cli.structure import say_if_long

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(cls=Command)
@click.option("--num-seqs", type=click.IntRange(min=1), default=8, help="Sequences that decode together.")
@click.option("--context", type=click.IntRange(min=1), default=128, help="Cached tokens of each sequence.")
@click.option("--steps", type=click.IntRange(min=1), default=30, help="Steps to measure of each of three kinds.")
@click.option("--png", type=FILE, help="Draw the profile (needs matplotlib).")
@click.option("--json", "json_file", type=FILE, help="Write the whole profile as JSON.")
@model_argument
@choice_options
@config_options_with(max_num_seqs="--num-seqs")
def profile(
    model: str | None,
    num_seqs: int,
    context: int,
    steps: int,
    png: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Show where a decode step's time goes. MODEL means the same as --model MODEL.

    The parts are linear layers, attention, small operators, sampler, scheduler, packing, Python. Sampling is greedy
    unless a temperature is given.

    Beside each part's time is its roofline: the least time by this machine's memory bandwidth and arithmetic speed,
    measured in the same run. The machine should be idle otherwise.
    """
    quiet_libraries()
    from rich.console import Console

    from inflight.contracts.api.config import EngineConfig
    from inflight.contracts.api.params import SamplingParams
    from inflight.engine.engine import Engine
    from inflight.entrypoints.inputs import model_source
    from inflight.observe.pictures import check_pictures, save_png
    from inflight.profiling import profile_decode
    from inflight.profiling.table import profile_figure, profile_table

    if png is not None:
        check_pictures()
    engine = Engine(
        model_source(model), EngineConfig(**{"max_num_seqs": num_seqs, "speculation": "off", **engine_values(options)})
    )
    params = SamplingParams(**{"temperature": 0, **sampling_values(options)})
    measured = profile_decode(engine, num_seqs, context, steps, params, say_if_long)
    Console().print(profile_table(measured))
    if json_file is not None:
        measured.write_json(json_file)
    if png is not None:
        save_png(profile_figure(measured), png)
