"""Compares the three executors: what the packed row gains.

python benchmarks/executors.py --model qwen3.5-0.8b --dtype bfloat16 --executors packed,rows

Rounds are interleaved in one process. Reported are tokens per second of `LLM.generate`, greedy, EOS ignored.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import RESULTS, describe_machine, in_turn
from benchmarks.peers.models import model_folder
from benchmarks.workloads import WORKLOADS, Workload
from inflight import LLM, SamplingParams


def run(llm: LLM, workload: Workload, number: int) -> float:
    """Run one round; return output tokens per second."""
    requests = workload.requests(number)
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=each.num_output_tokens) for each in requests]
    prompts = [[token % llm.model_info.vocab_size for token in each.prompt] for each in requests]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return workload.num_output_tokens / (time.perf_counter() - start)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="a name, as for compare.py, or a folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--executors", default="packed,rows,sequential")
    parser.add_argument("--workload", default="W2-32", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    source = str(model_folder(arguments.model))
    llms = {
        name: LLM(source, dtype=arguments.dtype, max_num_seqs=workload.num_slots, executor=name, speculation="off")
        for name in arguments.executors.split(",")
    }
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(-1, arguments.rounds):
        for name in in_turn(list(llms), number):
            speed = run(llms[name], workload, number)
            if number >= 0:
                speeds[name].append(speed)
                print(f"round {number + 1}: {name} {speed:.1f} tokens/s", flush=True)
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    info = next(iter(llms.values())).model_info
    lines = [
        f"# Executors: {arguments.model}, {arguments.dtype}, {arguments.workload}",
        "",
        f"{info.model_class}, {info.num_parameters / 1e6:.0f} M parameters, {workload.num_slots} slots, "
        f"{arguments.rounds} interleaved rounds, {torch.get_num_threads()} threads. {machine}.",
        "",
        "| executor | output tokens/s | from | to | the first: it |",
        "|---|---:|---:|---:|---:|",
    ]
    first = next(iter(speeds.values()))
    for name, each in speeds.items():
        ratio = median(a / b for a, b in zip(first, each, strict=True))
        lines.append(f"| {name} | {median(each):.1f} | {min(each):.1f} | {max(each):.1f} | {ratio:.2f} |")
    text = "\n".join([*lines, ""])
    print(text)
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    (
        arguments.output_folder / f"executors-{Path(arguments.model).name}-{arguments.dtype}-{workload.name}.md"
    ).write_text(text)


if __name__ == "__main__":
    main()
