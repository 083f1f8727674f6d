"""`inflight bench serve`: puts load on an OpenAI-compatible server, ours or any other."""

import asyncio
import json
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from inflight.cli.help import Command
from inflight.cli.structure import say_if_long

if TYPE_CHECKING:
    from inflight.loadtest.load_test import LoadPlan, LoadResult

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
RATE = click.FloatRange(min=0, min_open=True)
LENGTHS = "100, uniform:16:256, exponential:100 or lognormal:100:1."


NOT_WITH = {
    "workload": ("random_input_len", "random_output_len", "prompt_file", "trace"),
    "prompt_file": ("random_input_len", "prefix_len", "num_prefixes", "prompt_kind", "vocab_size", "trace"),
    "trace": ("random_input_len", "request_rate", "burstiness", "burst_size"),
}
"""Options that are sources of requests, each with the options that it excludes."""


@click.command(cls=Command)
@click.option("--base-url", default="http://127.0.0.1:8000", help="The server's URL, with or without /v1.")
@click.option("--model", "-m", help="The model's name on the server; default: the first one listed.")
@click.option("--endpoint", type=click.Choice(("completions", "chat")), default="completions", help="Endpoint.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--num-requests", type=POSITIVE, help="How many; default: 100, or all of a file or workload.")
@click.option("--random-input-len", default="100", help=f"Tokens of random prompts: {LENGTHS}")
@click.option("--random-output-len", default="100", help="Tokens of answers, unless given elsewhere; same forms.")
@click.option("--prefix-len", type=click.IntRange(min=0), help="Length of a prefix that all random prompts share.")
@click.option("--num-prefixes", type=POSITIVE, help="How many such prefixes; each prompt has one.  [default: 1]")
@click.option("--workload", type=click.Choice(("W1", "W2", "W3")), help="Use the lengths of a published workload.")
@click.option("--prompt-file", type=FILE, help="Prompts as JSON lines, or conversations in ShareGPT's format.")
@click.option("--trace", type=FILE, help="JSON lines with timestamp, prompt_tokens or prompt, and output_tokens.")
@click.option(
    "--prompt-kind",
    type=click.Choice(("auto", "ids", "words")),
    default="auto",
    help="Random prompts as token ids, as words, or as token ids if the server accepts them.",
)
@click.option("--vocab-size", type=click.IntRange(min=4), help="Token ids are below this; default: probed.")
@click.option("--request-rate", type=RATE, default=inf, help="Requests per second; inf: all at once.")
@click.option("--burstiness", type=RATE, default=1.0, help="1: Poisson; below 1: in clusters; above 1: more evenly.")
@click.option("--burst-size", type=POSITIVE, default=1, help="How many requests arrive together.")
@click.option("--max-concurrency", type=POSITIVE, help="Most requests in flight; others wait, which counts as latency.")
@click.option("--processes", "num_processes", type=POSITIVE, default=1, help="How many processes send the requests.")
@click.option("--warmups", type=click.IntRange(min=0), default=0, help="Uncounted requests before the run.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of lengths, prompts and arrivals.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="Temperature of all requests.")
@click.option("--extra-body", help="Additional fields of all requests, as a JSON object.")
@click.option("--timeout", type=RATE, default=600.0, help="Seconds after which a request counts as failed.")
@click.option("--goodput", multiple=True, help="Objectives in ms, such as ttft:500,tpot:50,e2e:5000.")
@click.option("--server-pid", type=POSITIVE, help="Also report the CPU time of this process and its descendants.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, and every request, as JSON.")
@click.option("--png", type=FILE, help="Draw the run (needs matplotlib).")
def serve(base_url: str, as_json: bool, png: Path | None, **options: Any) -> None:
    """Put load on a server, and report throughput and latencies.

    The load is open: requests arrive when they are due, however busy the server is, and latencies count from then.
    """
    from rich.console import Console

    from inflight.loadtest.load_test import as_rows
    from inflight.loadtest.openai_client import ServerError
    from inflight.loadtest.report import load_figure
    from inflight.observe.pictures import check_pictures, save_png

    plan, extra = _plan(options), _json_object(options["extra_body"])
    if png is not None:
        check_pictures()
    try:
        model, result = _run(base_url, plan, extra, options)
    except ServerError as error:
        raise click.ClickException(f"{base_url}: {error}") from error
    if as_json:
        run = {"base_url": base_url, **_for_json(options), "model": model, "dialect": asdict(result.dialect)}
        print(json.dumps({"run": run, "report": asdict(result.report), "requests": as_rows(result.records)}))
    else:
        Console(markup=False, highlight=False).print(result.report.tables())
    if png is not None:
        save_png(load_figure(result.records, f"{model} at {base_url}"), png)
    if not result.report.num_completed:
        sys.exit(1)


def _for_json(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options for JSON, without the API key."""
    given = {name: value for name, value in options.items() if name != "api_key" and value not in (None, ())}
    return {name: str(value) if isinstance(value, Path) or value == inf else value for name, value in given.items()}


def _plan(options: dict[str, Any]) -> "LoadPlan":
    from inflight.loadtest.files import read_prompts, read_trace
    from inflight.loadtest.load_test import LoadPlan
    from inflight.loadtest.report import Objectives
    from inflight.loadtest.workloads import WORKLOADS, random_sketches, repeated
    from inflight.simulate import Lengths

    _refuse_ignored_options(options)
    seed, count, prefix = options["seed"], options["num_requests"], options["prefix_len"]
    outputs = Lengths.parse(options["random_output_len"])
    if options["workload"]:
        workload = WORKLOADS[options["workload"]]
        sketches, prefix = repeated(workload.sketches, count), workload.num_prefix_tokens if prefix is None else prefix
    elif options["prompt_file"]:
        sketches = repeated(read_prompts(options["prompt_file"], outputs, seed), count)
    elif options["trace"]:
        sketches = read_trace(options["trace"], outputs, seed)[:count]
    else:
        sketches = random_sketches(count or 100, Lengths.parse(options["random_input_len"]), outputs, seed)
    names = (
        *("prompt_kind", "vocab_size", "request_rate", "burstiness", "burst_size"),
        *("max_concurrency", "num_processes", "timeout"),
    )
    return LoadPlan(
        sketches=sketches,
        num_prefix_tokens=prefix or 0,
        num_prefixes=options["num_prefixes"] or 1,
        num_warmups=options["warmups"],
        seed=seed,
        objectives=Objectives.parse(options["goodput"]) if options["goodput"] else None,
        server_pid=options["server_pid"],
        **{name: options[name] for name in names},
    )


def _refuse_ignored_options(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    for source, names in NOT_WITH.items():
        for name in names:
            if {source, name} <= given:
                raise click.UsageError(f"{_flag(name)} cannot be given with {_flag(source)}")
    if options["request_rate"] == inf:
        for name in ("burstiness", "burst_size"):
            if name in given:
                raise click.UsageError(f"{_flag(name)} needs a --request-rate")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object such as '{{\"top_k\": 5}}'", param_hint="--extra-body")
    return value


def _run(base_url: str, plan: "LoadPlan", extra: dict[str, Any], options: dict[str, Any]) -> "tuple[str, LoadResult]":
    """Run the load test, with progress on standard error; return the model's name and the result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from inflight.loadtest.dialect import Target
    from inflight.loadtest.load_test import load_test
    from inflight.loadtest.openai_client import OpenAIClient
    from inflight.loadtest.runner import Tally, allow_connections

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(
        *columns,
        console=console,
        disable=not console.is_terminal or plan.num_processes > 1,  # which tell nothing before their end
        transient=True,
        refresh_per_second=2,
    )
    bar = progress.add_task("connecting", total=len(plan.sketches))

    def watch(tally: Tally) -> None:
        ended = tally.num_completed + tally.num_failed
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        progress.update(bar, completed=ended, description=f"{tally.num_sent - ended} in flight{failed}")

    async def test() -> "tuple[str, LoadResult]":
        async with OpenAIClient(base_url, options["api_key"]) as client:
            model = options["model"] or await client.first_model()
            target = Target(options["endpoint"], model, options["temperature"], extra)
            return model, await load_test(client, target, plan, say=_say, watch=watch)

    allow_connections(len(plan.sketches))
    last = plan.sketches[-1].arrival
    say_if_long(len(plan.sketches) / plan.request_rate if last is None else last, "requests arrive for ")
    with progress:
        return asyncio.run(test())


def _say(line: str) -> None:
    print(f"inflight: {line}", file=sys.stderr)
