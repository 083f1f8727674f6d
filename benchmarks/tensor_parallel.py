"""What tensor parallelism on a CPU could gain: an upper bound, before there is any of it.

python -m benchmarks.tensor_parallel --model qwen3-0.6b --dtype bfloat16

Two ranks with one thread each, each with half of the heads, of the intermediate features and of the vocabulary, are
compared with one engine with two threads. The ranks are engines of a model with these halves, which run the same
requests at the same time on a core each; what they would have to exchange (two sums in each layer, in the order of the
ranks, through shared memory) is measured by itself and added to every step. Left out is that each waits for the slower
one at every sum. So what is built cannot be faster than this says.

Two and four sockets are simulated: the part of a step that reads weights is divided by their number, and a sum between
sockets takes as many times longer as `--far` says (lines of a cache come from another socket that much more slowly).
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder
from benchmarks.replicas import generate, running
from benchmarks.workloads import WORKLOADS, Workload
from inflight import AsyncLLM

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
SUMS_IN_LAYER = 2
SOURCE = Path(__file__).parent / "shared_sum.cpp"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="Its head_dim must be in its configuration.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", default="one,W2-32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--far", type=float, default=3.0)
    options = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    folder = model_folder(options.model)
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        sum_seconds = compiled_sum(Path(name) / "shared_sum")
        for rows in (1, 8, 32, 256):
            print(
                f"a sum of {rows} x {config['hidden_size']}: {1e6 * sum_seconds(rows * config['hidden_size']):.2f} us"
            )
        half = Path(name) / "half"
        half.mkdir()
        halves = {name: config[name] // 2 for name in DIVIDED}
        (half / "config.json").write_text(json.dumps(config | halves | {"eos_token_id": None, "bos_token_id": None}))
        for workload in options.workloads.split(","):
            asyncio.run(compare(folder, half, config, WORKLOADS[workload], sum_seconds, options))


def compiled_sum(program: Path) -> Any:
    """A function that gives the seconds of a sum of so many float32 between two cores."""
    subprocess.run(["g++", "-O3", "-march=native", "-std=c++17", str(SOURCE), "-o", str(program)], check=True)

    def seconds(num_values: int) -> float:
        done = [subprocess.run([program, str(num_values)], capture_output=True, check=True) for _ in range(3)]
        return statistics.median(float(each.stdout) for each in done)

    return seconds


async def compare(
    folder: Path, half: Path, config: dict[str, Any], workload: Workload, sum_seconds: Any, options: argparse.Namespace
) -> None:
    """One engine and two ranks in turn."""
    common: dict[str, Any] = {"dtype": options.dtype, "load_format": "dummy", "speculation": "off"}
    common |= {"max_model_len": workload.max_model_len, "max_num_seqs": workload.num_slots}
    common |= {"enable_prefix_caching": False, "num_blocks": 2000}
    seconds: dict[str, list[float]] = {"one": [], "ranks": []}
    async with (
        running(str(folder), 1, **common) as one,
        running(str(half), 2, routing="round-robin", **common) as ranks,
    ):
        for number in range(-1, options.rounds):
            before = await one.stats()
            took = await drive(one, workload, number, 1)
            after = await one.stats()
            took_ranks = await drive(ranks, workload, number, 2)
            if number >= 0:
                seconds["one"].append(took)
                seconds["ranks"].append(took_ranks)
    steps = after.num_steps - before.num_steps
    rows = (after.num_step_tokens - before.num_step_tokens) / steps
    num_sums = SUMS_IN_LAYER * config["num_hidden_layers"]
    each = sum_seconds(round(rows) * config["hidden_size"])
    whole, ranked, summing = (
        statistics.median(seconds["one"]),
        statistics.median(seconds["ranks"]),
        steps * num_sums * each,
    )
    print(f"{workload.name}: {steps} steps of {rows:.1f} rows; one engine {whole:.3f} s")
    print(f"  two ranks without sums {ranked:.3f} s, sums {summing:.3f} s, {1e6 * each:.2f} us each")
    print(f"  two ranks are at best {whole / (ranked + summing):.2f} times as fast")
    for sockets in (2, 4):
        far = whole / sockets + steps * num_sums * options.far * each * (sockets - 1)
        print(f"  {sockets} sockets of this kind, simulated: at best {whole / far:.2f} times one socket's speed")


async def drive(llm: AsyncLLM, workload: Workload, seed: int, times: int) -> float:
    """Seconds in which requests are answered, each by so many engines."""
    requests = [each for each in workload.requests(seed + 1) for _ in range(times)]
    start = time.monotonic()
    await asyncio.gather(*(generate(llm, each.prompt, each.num_output_tokens) for each in requests))
    return time.monotonic() - start


if __name__ == "__main__":
    main()
