"""`inflight bench`: measures the gain of continuous batching on this machine, and a server under load."""

import platform

import click

from inflight.cli.bench_serve import serve
from inflight.cli.help import Group, Option
from inflight.cli.options import MODEL, quiet_libraries
from inflight.cli.structure import say_if_long

MAX_SECONDS = 150.0
"""Of the rounds of `bench static`, by default; half a minute of warm-up comes before them."""


@click.group(cls=Group)
def bench() -> None:
    """Measure methods side by side on this machine, or a server under load."""
    quiet_libraries()


@bench.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Rounds over all methods; medians are shown.  [default: as many as take three minutes, at most 3]",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="Requests in each round.  [default: as many as take three minutes, 8 to 32]",
)
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", help="For weights and cache.")
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads.  [default: torch's choice]")
@click.option(
    "--model",
    "-m",
    cls=Option,
    heading=MODEL,
    help="Hub id or folder of the model.  [default: GPT-2's shape with random weights]",
)
def static(rounds: int | None, requests: int | None, dtype: str, threads: int | None, model: str | None) -> None:
    """Compare static waves, padded and ragged batches and the engine on this machine.

    All run greedily with 8 slots on GPT-2's shape (124 M parameters) with random weights, or on another model. First 32
    requests of 7 tokens, of which every eighth generates 100 tokens and the others 10. Then 32 requests that share 512
    tokens, have 16 of their own and generate 32: by two lessons, and by the engine with an empty cache (cold), the 512
    tokens cached (warm), or in files (disk). The generated tokens are compared, too. On a slow machine there are fewer
    requests and rounds.
    """
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from inflight.entrypoints.inputs import model_source
    from inflight.lessons import static_bench

    if threads is not None:
        torch.set_num_threads(threads)
    console, progress_console = Console(), Console(stderr=True)
    if model is None:
        name, contender = "GPT-2 124M", static_bench.gpt2_with_random_weights(getattr(torch, dtype))
    else:
        name, contender = model, static_bench.without_generation_defaults(model_source(model), dtype)
    console.print(
        f"{name}, {dtype}, {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n",
        highlight=False,
        markup=False,
    )
    rounds, requests, seconds = static_bench.size_for(contender, MAX_SECONDS, rounds, requests)
    size = f"{rounds} round{'s' * (rounds > 1)} of {requests} request{'s' * (requests > 1)}"
    say_if_long(seconds, f"{size}: ")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        TextColumn("left"),
        console=progress_console,
        disable=not progress_console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("warming up", total=None)
        comparisons = {
            f"{requests} requests, 100 new tokens for every eighth and 10 for the rest, 8 slots:": (
                static_bench.compare_rungs(contender, requests)
            ),
            f"\n{requests} requests that share 512 tokens, 32 new tokens each, {requests} slots:": (
                static_bench.compare_shared_prefix(contender, requests)
            ),
        }
        total = sum(rounds * each.num_tokens * len(each.contestants) for each in comparisons.values())
        bar.update(task, total=total, description="tokens")

        def say(line: str) -> None:
            progress_console.print(line, style="dim", highlight=False)

        measured = {
            heading: static_bench.measure(comparison, rounds, say, lambda number: bar.advance(task, number))
            for heading, comparison in comparisons.items()
        }
    for heading, results in measured.items():
        console.print(heading)
        console.print(static_bench.table_of(results))


bench.add_command(serve)
