"""Simulates a million requests of 100 output tokens on average, and measures its own time and memory.

python benchmarks/simulate_million.py [NUMBER OF REQUESTS]
"""

import resource
import sys
import time

from rich.console import Console

from inflight.contracts.api.config import EngineConfig
from inflight.observe.recorder import describe_machine
from inflight.simulate import Lengths, StepCost, SyntheticLoad, simulate

CONFIG = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=3600, max_model_len=2048)
COST = StepCost.linear(fixed=0.012, per_token=2e-5, per_context_token=5e-8)
RATE = 92.0
"""Requests per second: nearly as many as an engine of this size and cost can serve."""


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    for count in sorted({num_requests // 10, num_requests}):
        load = SyntheticLoad(
            num_requests=count,
            rate=RATE,
            prompt_tokens=Lengths("exponential", 100),
            output_tokens=Lengths("exponential", 100),
            shared_prefix_tokens=64,
            shared_prefix_share=0.5,
            num_prefixes=20,
            max_model_len=2048,
        )
        wall, processor = time.perf_counter(), time.process_time()
        report = simulate(load, CONFIG, COST)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"\n{count:,} requests: {wall:.0f} s, of which the processor {processor:.0f} s; peak memory {peak:.0f} MiB"
        )
        per_token, per_step = processor / report.num_output_tokens, processor / report.num_steps
        print(f"{per_token * 1e6:.2f} us a token, {per_step * 1e3:.2f} ms a step")
        Console(width=100).print(report.table())


if __name__ == "__main__":
    main()
