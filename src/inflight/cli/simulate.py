"""`inflight simulate`: predicts how a machine would serve a load, from its step costs."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_values, scheduling_options
from inflight.contracts.api.config import ROUTINGS

FILE = click.Path(path_type=Path)
LOAD = ("num_requests", "rate", "shared_prefix_tokens", "shared_prefix_share", "num_prefixes", "seed")


@click.command(cls=Command)
@click.option("--trace", type=FILE, help="Simulate the requests of a recording (inflight generate --record).")
@click.option("--synthetic", is_flag=True, help="Simulate synthetic requests, described by the next options.")
@click.option("--num-requests", type=click.IntRange(min=1), default=1000, help="Number of requests.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests per second; default: all at once.")
@click.option("--prompt-tokens", default="100", help="100, uniform:16:256, exponential:100 or lognormal:100:1.")
@click.option("--output-tokens", default="exponential:100", help="Same forms as --prompt-tokens.")
@click.option("--shared-prefix-tokens", type=click.IntRange(min=0), default=0, help="Length of a shared prefix.")
@click.option("--shared-prefix-share", type=click.FloatRange(0, 1), default=1.0, help="Share of prompts that have it.")
@click.option("--num-prefixes", type=click.IntRange(min=1), default=1, help="Number of different shared prefixes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random numbers.")
@click.option("--fit", type=FILE, multiple=True, help="A recording to fit step costs to; may be repeated.")
@click.option("--step-cost", help='Step costs in seconds, as JSON: \'{"fixed": 0.02, "per_token": 0.0001}\'.')
@click.option(
    "--acceptance", type=click.FloatRange(0, 1), help="Share of draft tokens that are accepted; 0: no speculation."
)
@click.option("--replicas", type=click.IntRange(min=1), default=1, help="Engines; each has these options.")
@click.option("--routing", type=click.Choice(ROUTINGS), default=ROUTINGS[0], help="Which of them gets a request.")
@click.option("--record", type=FILE, help="Write the simulated run as a recording, for inflight trace.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@scheduling_options
def simulate(
    trace: Path | None,
    synthetic: bool,
    fit: tuple[Path, ...],
    step_cost: str | None,
    acceptance: float | None,
    replicas: int,
    record: Path | None,
    **options: Any,
) -> None:
    """Predict how this machine would serve a load, by the real scheduler on a virtual clock.

    The report has throughput, latencies, preemptions and prefix hits. Engine options default to those of the trace, or
    of the first --fit. Step costs default to a fit to the trace, and draft and acceptance rates to the trace's.
    """
    if replicas > 1 and record is not None:
        raise click.UsageError("--record writes what one engine does; it cannot be given with --replicas")
    if (trace is None) != synthetic:
        raise click.UsageError("give either --trace FILE or --synthetic")
    from rich.console import Console

    from inflight.contracts.api.config import EngineConfig
    from inflight.observe.recorder import Recorder, read_recording
    from inflight.simulate import (
        AcceptanceRate,
        Lengths,
        StepCost,
        SyntheticLoad,
        WatchedCost,
        fit_cost,
        replay,
        simulate_replicas,
    )
    from inflight.simulate import simulate as run

    recorded = None if trace is None else read_recording(trace)
    learned_from = [read_recording(path) for path in fit] or ([recorded] if recorded else [])
    if step_cost is None and not learned_from:
        raise click.UsageError("the step costs are unknown: give --fit RECORDING or --step-cost JSON")
    like = recorded or next(iter(learned_from), None)
    values = engine_values(options)
    if values.pop("draft_model", None) is not None:
        raise click.UsageError("no draft model is loaded here: give its acceptance rate by --acceptance")
    if values.get("speculation") == "off" and acceptance:
        raise click.UsageError("--speculation off drafts nothing, whatever --acceptance is")
    recorded_config = EngineConfig() if like is None else like.config
    speculates_by_default = recorded_config.speculation.method != "off" or acceptance
    speculation = values.pop("speculation", "auto" if speculates_by_default else "off")
    config = recorded_config.replace(draft_model=None, speculation="off" if speculation == "off" else "auto", **values)
    cost = fit_cost(learned_from) if step_cost is None else StepCost.parse(step_cost)
    watched = WatchedCost.fit(cost, learned_from) if step_cost is None else None
    acceptance_rate = AcceptanceRate.from_steps(step for recording in learned_from for step in recording.steps)
    if acceptance is not None:
        acceptance_rate = AcceptanceRate(acceptance)
    if config.speculation.method == "off" or acceptance == 0:
        acceptance_rate = None
    requests = replay(recorded) if recorded else SyntheticLoad(
        **{name: options[name] for name in LOAD},
        prompt_tokens=Lengths.parse(options["prompt_tokens"]),
        output_tokens=Lengths.parse(options["output_tokens"]),
        max_model_len=config.max_model_len,
    )  # fmt: skip
    model = like.model if like else None
    with ExitStack() as stack:
        observer = stack.enter_context(Recorder(record, config)).observe if record else None
        if replicas > 1:
            report = simulate_replicas(
                requests,
                config,
                watched or cost,
                replicas,
                options["routing"],
                model=model,
                acceptance_rate=acceptance_rate,
            )
        else:
            report = run(
                requests, config, watched or cost, model=model, observer=observer, acceptance_rate=acceptance_rate
            )
    beyond = {} if watched is None else {"num_extrapolated_steps": watched.num_beyond}
    if options["as_json"]:
        print(json.dumps({**report.as_dict(), "step_cost": cost.as_dict(), **beyond}))
        return
    console = Console(highlight=False)
    console.print(report.table())
    if watched is not None and watched.warning:
        console.print(f"\n{watched.warning}")
