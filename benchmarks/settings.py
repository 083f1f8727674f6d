"""Compares settings of inflight with each other: the same requests, in turn, in one process.

python -m benchmarks.settings --model gpt2 --dtype bfloat16 --workloads one,W1 "" record_forward=False quantization=int8

Each setting is a list of options of `LLM`, separated by commas; "" is the defaults. For each workload every setting
has a model of its own, and one round that does not count; then rounds are interleaved, in an order that shifts. Printed
are median tokens/s, their range, and the median over rounds of each setting's speed divided by the first one's.
"""

import argparse
import ast
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.models import NAMED_MODELS, model_folder
from benchmarks.workloads import WORKLOADS, Workload
from inflight import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=options_of, metavar="SETTING")
    parser.add_argument("--model", default="gpt2", help=f"{', '.join(NAMED_MODELS)}, or what LLM takes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", default="one,W1,W2-32")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = str(model_folder(given.model)) if given.model in NAMED_MODELS else given.model
    for name in given.workloads.split(","):
        compare(model, given.dtype, WORKLOADS[name], given.settings, given.rounds)


def options_of(text: str) -> dict[str, Any]:
    """The options in `record_forward=False,kv_cache_dtype=int8`; values are Python's, or words."""
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def compare(model: str, dtype: str, workload: Workload, settings: Sequence[dict[str, Any]], num_rounds: int) -> None:
    """Run one workload with all settings and print the table."""
    common: dict[str, Any] = {"dtype": dtype, "max_num_seqs": workload.num_slots, "speculation": "off"}
    llms = [LLM(model, **common | options) for options in settings]
    speeds: list[list[float]] = [[] for _ in settings]
    for round_number in range(num_rounds + 1):
        for turn in range(len(llms)):
            number = (turn + round_number) % len(llms)
            speed = run(llms[number], workload, round_number)
            if round_number:
                speeds[number].append(speed)
    print(f"{workload.name}: {workload.description}")
    for options, ours in zip(settings, speeds, strict=True):
        said = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
        ratio = statistics.median(mine / first for mine, first in zip(ours, speeds[0], strict=True))
        print(f"  {said:30} {statistics.median(ours):8.1f} tokens/s ({min(ours):.1f} to {max(ours):.1f})  {ratio:.2f}")


def run(llm: LLM, workload: Workload, round_number: int) -> float:
    """Tokens/s of one round."""
    requests = workload.requests(round_number)
    params = [SamplingParams(temperature=0, max_tokens=each.num_output_tokens, ignore_eos=True) for each in requests]
    start = time.perf_counter()
    llm.generate([each.prompt for each in requests], params, use_tqdm=False)
    return workload.num_output_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
