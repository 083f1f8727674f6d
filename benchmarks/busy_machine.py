"""Speed beside other processes: how much of its fair share an engine gets, and the latency of its slowest calls.

    python -m benchmarks.busy_machine --model DIR --quantization int4 --streams 1

Rounds without other processes and beside some that only count are interleaved. The fair share of an engine with t
threads, on as many cores, beside n busy processes is t / (t + n) of its speed without them. (The number of threads is
the default; `OMP_NUM_THREADS` lowers it.)
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inflight import LLM, SamplingParams

COUNTING = (sys.executable, "-c", "while True: pass")
NUM_TOKENS = 48


@dataclass(frozen=True)
class Others:
    """Other processes.

    Attributes:
        niceness: 19 is the lowest priority that there is.
    """

    number: int
    niceness: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, they run."""
        command = ("nice", "-n", str(self.niceness), *COUNTING)
        processes = [subprocess.Popen(command) for _ in range(self.number)]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def fair_share(self, num_threads: int) -> float:
        """Of the speed without them."""
        return 1.0 if self.niceness else num_threads / (num_threads + self.number)


SITUATIONS = {
    "nobody else": Others(0),
    "2 busy processes": Others(2),
    "9 busy processes": Others(9),
    "2 of lowest priority": Others(2, niceness=19),
}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5, help="of each situation in a round")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, quantization=arguments.quantization, speculation="off")
    prompts = [[5 + number, 7, 9, 11] for number in range(arguments.streams)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

    def speeds(seconds: float) -> list[float]:
        """Tokens/s of one call after the other."""
        end, given = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            given.append(NUM_TOKENS * len(prompts) / (time.perf_counter() - start))
        return given

    speeds(1)
    measured: dict[str, list[float]] = {name: [] for name in SITUATIONS}
    for _ in range(arguments.rounds):
        for name, others in SITUATIONS.items():
            with others.running():
                measured[name] += speeds(arguments.seconds)
    quiet = statistics.median(measured["nobody else"])
    print(f"| {arguments.streams} streams, tokens/s | median | of the fair share | slowest call |\n|---|---|---|---|")
    for name, others in SITUATIONS.items():
        median = statistics.median(measured[name])
        share = median / quiet / others.fair_share(llm.model_info.num_threads)
        print(f"| {name} | {median:.1f} | {share:.2f} | {min(measured[name]):.1f} |")


if __name__ == "__main__":
    main()
