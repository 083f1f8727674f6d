"""Measures the time from starting a command to its first token: the whole process, and where its time goes.

python benchmarks/first_token.py
"""

import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise

ROUNDS = 5
COMMAND = [sys.executable, "-m", "inflight", "generate", "Once upon a time", "--max-tokens", "1"]


def main() -> None:
    totals = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        subprocess.run(COMMAND, check=True, capture_output=True)
        totals.append(time.perf_counter() - start)
    counted = sorted(totals[1:])  # the first run warms the file cache
    print(f"Python {platform.python_version()}, {platform.machine()}")
    print(f'`inflight generate "Once upon a time" --max-tokens 1`, start to exit, {ROUNDS} runs after a warm-up:')
    print(f"  median {statistics.median(counted):.2f} s (from {counted[0]:.2f} to {counted[-1]:.2f})")
    print("of which, in one process:")
    for name, seconds in stages():
        print(f"  {name:28} {seconds:5.2f} s")


def stages() -> list[tuple[str, float]]:
    """Return the steps on the way to the first token, each with its seconds."""
    laps = [("", time.perf_counter())]

    def lap(name: str) -> None:
        laps.append((name, time.perf_counter()))

    import torch  # noqa: F401

    lap("import torch")
    from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase  # noqa: F401

    lap("import transformers")
    from inflight import LLM

    lap("import inflight")
    llm = LLM()
    lap("load and prepare the model, load the tokenizer")
    next(llm.stream("Once upon a time"))
    lap("first step")
    return [(name, end - start) for (_, start), (name, end) in pairwise(laps)]


if __name__ == "__main__":
    main()
