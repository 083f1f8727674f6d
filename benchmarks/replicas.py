"""Several engines on one machine: how they compare with one, what routing saves, whether the simulator foretells it.

python benchmarks/replicas.py --measure threads --model gpt2
python benchmarks/replicas.py --measure routing --model qwen3-0.6b
python benchmarks/replicas.py --measure front
python benchmarks/replicas.py --measure memory --model qwen3-0.6b

threads: W2-32 on one engine with all cores, and on two engines with half of them each, in turn.
routing: 20 prefixes of 1,000 tokens, of which each of two caches holds 8; every request has one of them and 20 tokens
    of its own. The same requests arrive at the same times for each way of routing; costs of steps are fitted to other
    requests, and the same are simulated, on two replicas and on four.
front: what the caller's process spends on a token of 64 streams, with one front of two engines, and with two fronts of
    one engine each, between which the caller chooses.
memory: what processes of two replicas take, and how fast they decode, with weights shared and not.
"""

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

import numpy as np

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder
from benchmarks.workloads import WORKLOADS
from inflight import AsyncLLM, SamplingParams
from inflight.contracts.api.config import ROUTINGS, EngineConfig
from inflight.contracts.step.record import RecordTo
from inflight.engine.fleet import Fleet
from inflight.engine.process.connection import ProcessConnection
from inflight.observe.recorder import read_recording
from inflight.simulate import Lengths, SimulatedRequest, SyntheticLoad, fit_cost, simulate_replicas

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS, CACHED_PREFIXES = 20, 1000, 20, 8
NUM_SLOTS = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=("threads", "routing", "front", "memory"), required=True)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--routings", default=",".join(ROUTINGS))
    parser.add_argument("--rate", type=float, default=1.0, help="Of routing: requests per second.")
    options = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    measure = {"threads": threads, "routing": routing, "front": front, "memory": memory}[options.measure]
    asyncio.run(measure(options))


@asynccontextmanager
async def running(model: str | None, replicas: int, **options: Any) -> AsyncIterator[AsyncLLM]:
    """Engines that are all loaded."""
    llm = AsyncLLM(None if model is None else str(model_folder(model)), replicas=replicas, **options)
    async with llm:
        while len(llm._client.sessions()) < replicas:
            await asyncio.sleep(0.1)
        yield llm


async def generate(llm: AsyncLLM, prompt: Sequence[int], num_tokens: int) -> float:
    """Seconds to the first token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start, first = time.monotonic(), None
    async for _ in llm.stream(list(prompt), params):
        first = first or time.monotonic()
    assert first is not None
    return first - start


# ------------------------------------------------------------------------------------------------- one or two


async def threads(options: argparse.Namespace) -> None:
    workload, num_cores = WORKLOADS["W2-32"], len(os.sched_getaffinity(0))
    common = {"dtype": options.dtype, "max_model_len": workload.max_model_len, "speculation": "off"}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    async with (
        running(options.model, 1, max_num_seqs=32, **common) as one,
        running(options.model, 2, max_num_seqs=32, **common) as two,
    ):
        for number in range(-1, options.rounds):  # the first is not counted
            for llm in (one, two) if number % 2 else (two, one):
                requests = workload.requests(2 * number + llm.num_replicas)
                start = time.monotonic()
                await asyncio.gather(*(generate(llm, each.prompt, each.num_output_tokens) for each in requests))
                if number >= 0:
                    seconds[llm.num_replicas].append(time.monotonic() - start)
    medians = {number: statistics.median(each) for number, each in seconds.items()}
    for number, median in medians.items():
        what = f"{number} x {num_cores // number} threads"
        each = ", ".join(f"{one:.2f}" for one in seconds[number])
        print(f"{what}: {median:.3f} s, {workload.num_output_tokens / median:.1f} tokens/s ({each})")
    print(f"two replicas are {medians[1] / medians[2]:.2f} times as fast")


# ------------------------------------------------------------------------------------------------- routing


def load_of(num_requests: int, rate: float, seed: int) -> list[SimulatedRequest]:
    load = SyntheticLoad(
        num_requests=num_requests,
        rate=rate,
        prompt_tokens=Lengths("fixed", OWN_TOKENS),
        output_tokens=Lengths("uniform", 8, 40),
        shared_prefix_tokens=PREFIX_TOKENS,
        num_prefixes=NUM_PREFIXES,
        seed=seed,
    )
    return list(load)


async def drive(llm: AsyncLLM, requests: Sequence[SimulatedRequest]) -> list[float]:
    """Send requests when they are due; return the seconds from then to each one's first token."""
    began = time.monotonic()

    async def one(request: SimulatedRequest) -> float:
        await asyncio.sleep(max(0.0, began + request.arrival - time.monotonic()))
        late = time.monotonic() - began - request.arrival
        return late + await generate(llm, request.prompt_token_ids, request.num_output_tokens[0])

    return list(await asyncio.gather(*map(one, requests)))


async def routing(options: argparse.Namespace) -> None:
    num_blocks = CACHED_PREFIXES * -(-PREFIX_TOKENS // 16) + NUM_SLOTS * 6
    common: dict[str, Any] = {"max_num_seqs": NUM_SLOTS, "num_blocks": num_blocks, "max_model_len": 1200}
    common |= {"speculation": "off", "dtype": options.dtype}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        async with running(options.model, 2, record_to=RecordTo(path=str(path)), **common) as llm:
            await drive(llm, load_of(options.requests, options.rate, seed=99))
        recordings = [read_recording(path.with_name(f"steps-{number}.jsonl")) for number in range(2)]
    cost, config = fit_cost(recordings), EngineConfig(**common)
    requests = load_of(options.requests, options.rate, seed=1)
    print(f"{options.requests} requests, {options.rate} a second; time to the first token, measured (simulated):")
    for each in options.routings.split(","):
        async with running(options.model, 2, routing=each, **common) as llm:
            await drive(llm, load_of(20, options.rate, seed=98))  # the router learns, and nothing is cached of the rest
            before = await llm.stats()
            times = await drive(llm, requests)
            after = await llm.stats()
        hits = (after.num_cached_tokens - before.num_cached_tokens) / (
            after.num_prompt_tokens - before.num_prompt_tokens
        )
        measured = np.percentile(times, (50, 95)) * 1000
        foretold = simulate_replicas(requests, config, cost, 2, each, model=recordings[0].model)
        p50, p95 = foretold.time_to_first_token.p50 * 1000, foretold.time_to_first_token.p95 * 1000
        print(
            f"  2 replicas, {each:12} p50 {measured[0]:7.0f} ({p50:7.0f}) ms, {p50 / measured[0]:.2f}   "
            f"p95 {measured[1]:7.0f} ({p95:7.0f}) ms, {p95 / measured[1]:.2f}   "
            f"hits {hits:.0%} ({foretold.hit_rate:.0%})"
        )
    for each in ROUTINGS:
        report = simulate_replicas(load_of(1000, 2 * options.rate, seed=1), config, cost, 4, each)
        first = report.time_to_first_token
        print(
            f"  4 replicas, {each:12} simulated, twice the rate: p50 {first.p50 * 1000:7.0f} ms   "
            f"p95 {first.p95 * 1000:7.0f} ms   hits {report.hit_rate:.0%}"
        )


# ------------------------------------------------------------------------------------------------- the front


async def front(options: argparse.Namespace) -> None:
    num_tokens, num_streams = 400, 32
    micros: dict[str, list[float]] = {"one front of two engines": [], "two fronts of one engine each": []}
    common = {"dtype": "bfloat16", "speculation": "off", "num_threads": 1}
    async with (
        running(None, 2, **common) as both,
        running(None, 1, **common) as one,
        running(None, 1, **common) as other,
    ):
        of_name = dict(zip(micros, ((both, both), (one, other)), strict=True))
        for number in range(-1, options.rounds):
            for name in micros if number % 2 else reversed(micros):
                start = time.process_time()
                prompts = ([5, 6 + number, 7 + each] * 20 for each in range(2 * num_streams))
                llms = of_name[name] * num_streams
                await asyncio.gather(*map(generate, llms, prompts, [num_tokens] * len(llms)))
                if number >= 0:
                    spent = time.process_time() - start
                    micros[name].append(1e6 * spent / (len(llms) * num_tokens))
    medians = {name: statistics.median(each) for name, each in micros.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.1f} us of the caller's process for each token")
    print(f"ratio {medians['one front of two engines'] / medians['two fronts of one engine each']:.3f}")


# ------------------------------------------------------------------------------------------------- memory


async def memory(options: argparse.Namespace) -> None:
    common = {"dtype": options.dtype, "speculation": "off", "num_blocks": 500}
    seconds: dict[str, list[float]] = {"shared": [], "not shared": []}
    async with running(options.model, 2, **common) as shared:
        alone = AsyncLLM(str(model_folder(options.model)), replicas=2, **common)
        assert isinstance(alone._client, Fleet)
        alone._client._launches._weights_files = {}
        async with alone:
            while len(alone._client.sessions()) < 2:
                await asyncio.sleep(0.1)
            for number in range(-1, options.rounds):
                for name, llm in (("shared", shared), ("not shared", alone)):
                    start = time.monotonic()
                    await asyncio.gather(*(generate(llm, [5 + each, 8 + number] * 20, 64) for each in range(2)))
                    if number >= 0:
                        seconds[name].append(time.monotonic() - start)
            for name, llm in (("shared", shared), ("not shared", alone)):
                mebibytes = sum(map(proportional_memory, llm._client.sessions().values()))
                print(
                    f"{name}: {mebibytes} MiB in both processes; 2 x 64 tokens {statistics.median(seconds[name]):.3f} s"
                )


def proportional_memory(session: Any) -> int:
    """MiB of a process, shared pages divided among those who share them."""
    connection = session.connection
    assert isinstance(connection, ProcessConnection)
    text = Path(f"/proc/{connection.pid}/smaps_rollup").read_text()
    found = re.search(r"Pss:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) // 1024


if __name__ == "__main__":
    main()
