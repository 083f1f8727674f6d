"""`inflight bench`: measures what continuous batching gains on this machine, and how a server performs under load."""

import platform

import click

from inflight.cli.bench_serve import serve
from inflight.cli.help import Group
from inflight.cli.options import quiet_libraries


@click.group(cls=Group)
def bench() -> None:
    """Measure methods side by side on this machine, or a server under load."""
    quiet_libraries()


@bench.command()
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Rounds over all methods; medians are shown.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", help="For weights and cache.")
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads; default: torch's choice.")
def static(rounds: int, dtype: str, threads: int | None) -> None:
    """Compare static waves, padded and ragged batches and the engine on this machine.

    The model is GPT-2's shape (124 M parameters, random weights) with 8 slots, greedy. First 32 requests of 7 tokens,
    of which every eighth generates 100 tokens and the others 10. Then 32 requests that share 512 tokens, have 16 of
    their own and generate 32. The generated tokens are compared, too.
    """
    import torch
    import transformers
    from rich.console import Console

    from inflight.lessons import static_bench

    if threads is not None:
        torch.set_num_threads(threads)
    console, progress = Console(), Console(stderr=True)
    model = static_bench.gpt2_with_random_weights(getattr(torch, dtype))

    def say(line: str) -> None:
        progress.print(line, style="dim", highlight=False)

    console.print(
        f"GPT-2 124M, {dtype}, {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n",
        highlight=False,
    )
    console.print("32 requests, 100 new tokens for every eighth and 10 for the rest, 8 slots:")
    console.print(static_bench.table_of(static_bench.measure_rungs(model, rounds, say)))
    console.print("\n32 requests that share 512 tokens, 32 new tokens each, 32 slots:")
    console.print(static_bench.table_of(static_bench.measure_shared_prefix(model, rounds, say)))


bench.add_command(serve)
