"""Does the simulator predict a run that it has not seen? It is fitted to other workloads and compared with W2.

OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python benchmarks/simulate_w2.py [ROUNDS]

GPT-2 124M, random weights, float32, greedy, EOS ignored. W2: 32 requests, prompts of 16 to 256 tokens, heavy-tailed
outputs, 1,065 tokens in all. The fit uses, with the same numbers of slots, 32 prompts of 7 tokens with 100 or 10 new
tokens, and 24 prompts of 8 to 300 tokens with 2 to 40 new tokens. Each round records all of these and W2 in turn, so
that changes in the machine's speed affect all alike.
"""

import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.observe.recorder import Recorder, Recording, describe_machine, read_recording
from inflight.observe.run_report import report_of
from inflight.simulate import SimulatedRequest, fit_cost, simulate
from inflight.simulate.step_cost import load_of, timed_steps

SLOTS = (8, 32)
VOCABULARY = 50257
NUM_W2_TOKENS = 1065

Workload: TypeAlias = list[tuple[list[int], int]]
"""Prompts, and how many tokens each one gets."""


def w2(seed: int) -> Workload:
    """Return 32 requests with Pareto-distributed outputs: a few are longer than all others together."""
    rng = random.Random(seed)
    shares = [rng.paretovariate(1.2) for _ in range(32)]
    outputs = [max(1, round(NUM_W2_TOKENS * share / sum(shares))) for share in shares]
    outputs[outputs.index(max(outputs))] += NUM_W2_TOKENS - sum(outputs)
    return [(tokens(rng, rng.randint(16, 256)), count) for count in outputs]


def long_and_short(seed: int) -> Workload:
    rng = random.Random(seed)
    return [(tokens(rng, 7), 100 if number % 8 == 0 else 10) for number in range(32)]


def mixed(seed: int) -> Workload:
    rng = random.Random(seed)
    return [(tokens(rng, rng.choice((8, 30, 100, 300))), rng.randint(2, 40)) for _ in range(24)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def run(engine: Engine, workload: Workload, path: Path) -> Recording:
    """Run all requests at once and record the run."""
    with Recorder(path, engine.config, engine.model_info) as recorder:
        engine.observer = recorder.observe
        for number, (prompt, count) in enumerate(workload):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            engine.submit(engine.inputs.accept(str(number), prompt, params))
        while engine.has_unfinished_requests:
            engine.step()
    engine.observer = None
    return read_recording(path)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    model = gpt2_with_random_weights(torch.float32)
    engines = {slots: Engine(model, EngineConfig(max_num_seqs=slots, speculation="off")) for slots in SLOTS}
    for engine in engines.values():
        warm_up(engine)
    ratios: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    print("round  slots  predicted   measured  ratio   steps        step error   TPOT p50            TTFT p50")
    for number in range(rounds):
        for slots, engine in engines.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "recording"
                before = run(engine, mixed(10 + number), path)
                measured = run(engine, w2(100 + number), path)
                learned_from = [before, run(engine, long_and_short(20 + number), path)]
            ratios[slots].append(compare(number, learned_from, w2(100 + number), measured))
    for slots, all_of_them in ratios.items():
        print(
            f"{slots} slots: predicted / measured, median {statistics.median(all_of_them):.3f}, of {len(all_of_them)}"
        )


def warm_up(engine: Engine) -> None:
    """Touch the cache and torch's memory, which happens only once in an engine's life."""
    for number in range(16):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.submit(engine.inputs.accept(str(number), [number + 1] * 300, params))
    while engine.has_unfinished_requests:
        engine.step()


def compare(number: int, learned_from: list[Recording], workload: Workload, measured: Recording) -> float:
    """Predict the run from its requests alone; print a line, and return predicted / measured wall time."""
    cost, slots = fit_cost(learned_from), measured.config.scheduling.max_num_seqs
    requests = [SimulatedRequest(str(n), 0.0, prompt, (count,)) for n, (prompt, count) in enumerate(workload)]
    predicted, actual = simulate(requests, measured.config, cost), report_of(measured)
    errors = [abs(cost.seconds(load_of(step)) / seconds - 1) for step, seconds in timed_steps(measured.steps)]
    print(
        f"{number + 1:5}  {slots:5}  {predicted.seconds:7.2f} s  {actual.seconds:7.2f} s  "
        f"{predicted.seconds / actual.seconds:5.3f}  {predicted.num_steps:4} ({actual.num_steps:4})  "
        f"{statistics.median(errors):10.1%}  "
        f"{predicted.time_per_output_token.p50 * 1e3:5.0f} ({actual.time_per_output_token.p50 * 1e3:5.0f}) ms  "
        f"{predicted.time_to_first_token.p50:7.2f} ({actual.time_to_first_token.p50:6.2f}) s",
        flush=True,
    )
    return predicted.seconds / actual.seconds


if __name__ == "__main__":
    main()
