"""Record a run, then ask the simulator what other options, or another load, would do.

    python examples/capacity_planning.py                    # the embedded model
    python examples/capacity_planning.py ./my-model

A recording has every step with its time. From it the simulator learns what a step costs on this machine; then it runs
the real scheduler on a virtual clock. So the answers are about this machine and this model.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_PROMPTS = 48
OBJECTIVE = 0.25
"""Seconds in which 95 % of the first tokens should have come."""
STORY = "once upon a time there lived a small brave fox who loved the sea and an old owl in a quiet village"


def inflight(*arguments: object) -> str:
    """Run the command, and return what it prints."""
    command = [sys.executable, "-m", "inflight", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def record(folder: Path, model: list[str]) -> Path:
    """A run of prompts and outputs of various lengths, as yours might be."""
    rng, words = random.Random(1), STORY.split()
    requests = [
        {"prompt": " ".join(rng.choices(words, k=rng.randrange(5, 80))), "max_tokens": rng.randrange(5, 60)}
        for _ in range(NUM_PROMPTS)
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    inflight("generate", "-f", folder / "requests.jsonl", "--record", folder / "run.jsonl", "--ignore-eos", *model)
    return folder / "run.jsonl"


def summary(report: dict[str, Any]) -> str:
    first_token = report["time_to_first_token"]
    return (
        f"{report['output_tokens_per_second']:5.0f} tokens a second, first token after "
        f"{first_token['p50']:.3f} s (95 %: {first_token['p95']:.3f} s)"
    )


def main() -> None:
    model = ["-m", sys.argv[1]] if len(sys.argv) > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        run = record(Path(folder), model)
        print("The same requests, all at once:")
        for slots in (4, 16):
            report = json.loads(inflight("simulate", "--trace", run, "--max-num-seqs", slots, "--json"))
            print(f"{slots:4} slots               {summary(report)}")
        print("Prompts of 40 tokens and outputs of 30, as they come:")
        for rate in (2, 10, 50):
            load = ["--synthetic", "--num-requests", 200, "--rate", rate, "--prompt-tokens", 40, "--output-tokens", 30]
            report = json.loads(inflight("simulate", *load, "--fit", run, "--json"))
            is_met = report["time_to_first_token"]["p95"] <= OBJECTIVE
            print(f"{rate:4} requests a second {summary(report)}{'' if is_met else ', too slow'}")


if __name__ == "__main__":
    main()
