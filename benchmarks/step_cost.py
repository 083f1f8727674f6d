"""A decode step's own cost: plan, row, sampling, commit and report, everything except the forward pass.

python benchmarks/step_cost.py [--beside ANOTHER_CHECKOUT] [--rounds 5]

32 sequences decode on a tiny model whose forward pass is replaced by fixed logits. With `--beside`, both trees run in
turn, each in a process of its own, so that the machine's mood affects both alike.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_SEQUENCES = 32
NUM_STEPS = 400
VOCAB_SIZE = 512
KINDS = {"greedy": 0.0, "sampled": 0.9}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, to run in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps({kind: microseconds_per_step(temperature) for kind, temperature in KINDS.items()}))
        return
    trees = [Path(__file__).resolve().parents[1]] + ([arguments.beside.resolve()] if arguments.beside else [])
    results: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _ in range(arguments.rounds):
        for tree in trees:
            results[tree].append(measured_in(tree))
    for tree, rounds in results.items():
        medians = {kind: statistics.median(each[kind] for each in rounds) for kind in KINDS}
        print(f"{tree}: " + ", ".join(f"{kind} {median:.0f} µs" for kind, median in medians.items()))


def measured_in(tree: Path) -> dict[str, float]:
    """Run this script once with another tree's package."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--once"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def microseconds_per_step(temperature: float) -> float:
    """The median of a step's own cost in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from inflight.contracts.api.config import EngineConfig
    from inflight.contracts.api.params import SamplingParams
    from inflight.engine.engine import Engine

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, num_key_value_heads=4, **sizes)
    engine = Engine(
        AutoModelForCausalLM.from_config(config),
        EngineConfig(max_num_seqs=NUM_SEQUENCES, num_blocks=4000, speculation="off"),
    )
    params = SamplingParams(temperature=temperature, max_tokens=2 * NUM_STEPS, ignore_eos=True)
    for number in range(NUM_SEQUENCES):
        engine.submit(engine.inputs.accept(str(number), [number + 1] * 64, params))
    engine.step()
    logits = torch.randn(NUM_SEQUENCES, VOCAB_SIZE)
    engine.runner.executor.forward = lambda *_: logits  # type: ignore[method-assign]
    seconds = []
    gc.collect()
    gc.freeze()
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    gc.unfreeze()
    return 1e6 * statistics.median(seconds)


if __name__ == "__main__":
    main()
