"""`inflight profile MODEL`: where a decode step's time goes, against what this machine could do at best."""

from pathlib import Path
from typing import Any

import click

from inflight.cli.options import choice_options, config_options, engine_values, quiet_libraries, sampling_values

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("model", required=False)
@click.option("--num-seqs", type=click.IntRange(min=1), default=8, help="Sequences that decode together.")
@click.option("--context", type=click.IntRange(min=1), default=128, help="Cached tokens of each of them.")
@click.option("--steps", type=click.IntRange(min=1), default=30, help="Steps to measure, of each of three kinds.")
@click.option("--png", type=FILE, help="Draw it (needs matplotlib).")
@click.option("--json", "json_file", type=FILE, help="Write all of it as JSON.")
@choice_options
@config_options
def profile(
    model: str | None,
    num_seqs: int,
    context: int,
    steps: int,
    png: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Take a decode step of MODEL apart (the small embedded one, if none is named): linears, attention, small
    operators, sampler, scheduler, packing, Python. Tokens are chosen greedily unless a temperature is given.

    Beside what each part takes stands the least that this machine needs for it: reading and arithmetic are measured in
    the same run. The machine should have nothing else to do.
    """
    quiet_libraries()
    from rich.console import Console

    from inflight.contracts.config import EngineConfig
    from inflight.contracts.params import SamplingParams
    from inflight.engine.engine import Engine
    from inflight.inputs import model_source
    from inflight.observe.pictures import save_png
    from inflight.profiling import profile_decode
    from inflight.profiling.figure import profile_figure
    from inflight.profiling.table import profile_table

    engine = Engine(model_source(model), EngineConfig(**{"max_num_seqs": num_seqs, **engine_values(options)}))
    params = SamplingParams(**{"temperature": 0, **sampling_values(options)})
    taken_apart = profile_decode(engine, num_seqs, context, steps, params)
    Console().print(profile_table(taken_apart))
    if json_file is not None:
        taken_apart.write_json(json_file)
    if png is not None:
        save_png(profile_figure(taken_apart), png)
