"""How long preparation takes: four models of 1 to 1.4 billion parameters, bfloat16, random weights.

python benchmarks/preparation_time.py

Each model is loaded twice, each time in a process of its own: first when nothing is known about its class and
configuration, then when the verdict of its twin is remembered. "Probing" is everything between loading the weights and
allocating the cache, except prepacking the weights, which is reported separately: finding the executor, proving it,
comparing the model with its plain results, testing whether it is batch invariant.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks import shapes
from benchmarks.compare import RESULTS, describe_machine

SHAPES = (shapes.LLAMA_3_2_1B, shapes.GEMMA_3_1B, shapes.BLOOM_1B1, shapes.MAMBA_1_4B)


@dataclass(frozen=True)
class Load:
    """The times of one load, in seconds."""

    executor: str
    proved_on: str
    probing: float
    prepacking: float


def load(folder: str, remembered: str) -> Load:
    """Load a model in this fresh process; verdicts are in the folder `remembered`."""
    from inflight.contracts.config import EngineConfig
    from inflight.execution.preparation import own_attention, packed_way, prepare
    from inflight.execution.preparation.result_cache import ResultCache

    seconds = {"choosing": 0.0, "prepacking": 0.0}

    def timed(module: Any, name: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds[phase] += time.perf_counter() - start

        setattr(module, name, run)

    timed(prepare, "choose_executor", "choosing")
    for module in (packed_way, own_attention):
        timed(module, "prepack_linears", "prepacking")
        timed(module, "prepack_experts", "prepacking")
    ResultCache.of_the_user = lambda kind: ResultCache(Path(remembered), kind)  # type: ignore[method-assign]
    config = EngineConfig(load_format="dummy", dtype="bfloat16", num_blocks=200)
    info = prepare.prepare(folder, config).info
    return Load(info.executor, info.proved_on, seconds["choosing"] - seconds["prepacking"], seconds["prepacking"])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    loads: dict[tuple[str, str], list[Load]] = {}
    for _ in range(arguments.rounds):
        for shape in SHAPES:
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as remembered:
                shape.save(folder)
                for _ in range(2):
                    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                        found = pool.submit(load, folder, remembered).result()
                    loads.setdefault((shape.name, found.proved_on), []).append(found)
                    print(shape.name, found, flush=True)
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        "# How long preparation takes",
        "",
        f"bfloat16, random weights, medians of {arguments.rounds} rounds. {machine}.",
        "",
        "| shape | executor | proved on | probing s (lowest to highest) | prepacking s |",
        "|---|---|---|---:|---:|",
    ]
    for (name, proved_on), each in loads.items():
        probing = sorted(one.probing for one in each)
        lines.append(
            f"| {name} | {each[0].executor} | {proved_on} | {statistics.median(probing):.1f} "
            f"({probing[0]:.1f} to {probing[-1]:.1f}) | {statistics.median(one.prepacking for one in each):.1f} |"
        )
    text = "\n".join([*lines, ""])
    print(text)
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    (arguments.output_folder / "preparation-time.md").write_text(text)


if __name__ == "__main__":
    main()
