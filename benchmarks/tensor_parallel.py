"""A model that two ranks run together, compared with one engine that has the cores of both.

python -m benchmarks.tensor_parallel --model qwen3-0.6b --dtype bfloat16

One engine runs with a thread on each core, the other with two ranks, which share the cores; they take turns. Weights
are random. The time that ranks need to meet is measured by itself, too: what a sum of as many rows takes as a step has.

Two and four sockets are simulated, from the engine of one process: what a step takes is divided by their number, and a
sum between sockets takes as many times longer as `--far` says (lines of a cache come from another socket that much more
slowly).
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder
from benchmarks.replicas import generate, running
from benchmarks.workloads import WORKLOADS, Workload
from inflight import AsyncLLM
from inflight.execution.ranks.rank import Rank
from inflight.host.machine import place

SUMS_IN_LAYER = 2
NUM_SUMS = 2000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--workloads", default="one,W2-32,prompt-4k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--far", type=float, default=3.0)
    parser.add_argument("--sum", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum:
        file, rows, columns = options.sum
        sum_often(Rank(1, 2, file), rows, columns, 1)
        return
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    folder = str(model_folder(options.model))
    config = AutoConfig.from_pretrained(folder)
    for rows in (1, 8, 32, 256):
        print(f"a sum of {rows} x {config.hidden_size}: {1e6 * seconds_of_sum(rows, config.hidden_size):.1f} us")
    for name in options.workloads.split(","):
        asyncio.run(compare(folder, WORKLOADS[name], config.num_hidden_layers, config.hidden_size, options))


def seconds_of_sum(rows: int, columns: int) -> float:
    """What a sum of rows of bfloat16 takes two processes on cores of their own; the median of three runs."""
    seconds = []
    for _ in range(3):
        file = os.memfd_create("measured")
        numbers = map(str, (file, rows, columns))
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--sum", *numbers]
        with subprocess.Popen(command, pass_fds=(file,)):
            seconds.append(sum_often(Rank(0, 2, file), rows, columns, 0))
        os.close(file)
    return statistics.median(seconds)


def sum_often(rank: Rank, rows: int, columns: int, place_number: int) -> float:
    """Seconds of a sum, after some that are not counted."""
    cpus, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, place(2)[place_number].cpus)
    torch.set_num_threads(1)
    values = torch.ones(rows, columns, dtype=torch.bfloat16)
    for _ in range(NUM_SUMS // 10):
        rank.sum(values)
    start = time.perf_counter()
    for _ in range(NUM_SUMS):
        rank.sum(values)
    seconds = (time.perf_counter() - start) / NUM_SUMS
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, cpus)
    return seconds


async def compare(
    folder: str, workload: Workload, num_layers: int, hidden_size: int, options: argparse.Namespace
) -> None:
    """One process and two ranks in turn."""
    common: dict[str, Any] = {"dtype": options.dtype, "load_format": "dummy", "speculation": "off"}
    common |= {"max_model_len": workload.max_model_len, "max_num_seqs": workload.num_slots}
    common |= {"enable_prefix_caching": False, "num_blocks": 2000, "quantization": options.quantization}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    async with running(folder, 1, **common) as one, running(folder, 1, tensor_parallel_size=2, **common) as two:
        for number in range(-1, options.rounds):
            before = await one.stats()
            for llm in (one, two) if number % 2 else (two, one):
                took = await drive(llm, workload, number)
                if number >= 0:
                    seconds[llm.config.tensor_parallel_size].append(took)
            after = await one.stats()
    steps = after.num_steps - before.num_steps
    rows = (after.num_step_tokens - before.num_step_tokens) / steps
    num_sums = steps * SUMS_IN_LAYER * num_layers
    each = seconds_of_sum(round(rows), hidden_size)
    whole, ranked = (statistics.median(each) for each in seconds.values())
    print(f"{workload.name}: {steps} steps of {rows:.1f} rows")
    print(f"  one process {whole:.3f} s ({said(seconds[1])}), two ranks {ranked:.3f} s ({said(seconds[2])})")
    print(f"  two ranks are {whole / ranked:.2f} times as fast; {num_sums * each:.3f} s of theirs are sums")
    for sockets in (2, 4):
        far = whole / sockets + num_sums * options.far * each * (sockets - 1)
        print(f"  {sockets} sockets of this kind, simulated: at best {whole / far:.2f} times one socket's speed")


def said(seconds: list[float]) -> str:
    """Times in words."""
    return ", ".join(f"{each:.2f}" for each in seconds)


async def drive(llm: AsyncLLM, workload: Workload, seed: int) -> float:
    """Seconds in which all requests are answered."""
    start = time.monotonic()
    requests = workload.requests(seed + 1)
    await asyncio.gather(*(generate(llm, each.prompt, each.num_output_tokens) for each in requests))
    return time.monotonic() - start


if __name__ == "__main__":
    main()
