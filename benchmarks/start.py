"""How long a model takes to start: from a process's start to the end of `inflight generate` with one token.

python benchmarks/start.py [MODEL ...] [--other TREE]

The first start of each model has an empty cache of proofs (kernels are kept), the others find what it kept. Runs take
turns with processes that only import torch and `transformers`, whose time is subtracted, and with another checkout of
this tree. A row has medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import RESULTS, describe_machine
from inflight.demo_model import DEMO_MODEL
from inflight.execution.kernels import cache_folder

ROOT = Path(__file__).resolve().parents[1]


def seconds(tree: Path, cache: str, *arguments: str) -> float:
    """Of a Python process with these arguments."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "XDG_CACHE_HOME": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set, each start compiles all of our files
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(DEMO_MODEL)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="another checkout")
    arguments = parser.parse_args()
    trees = {"this tree": ROOT} | ({"the other tree": arguments.other.resolve()} if arguments.other else {})
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        "# How long a model takes to start",
        "",
        f"Seconds beyond importing torch and transformers. {machine}.",
    ]
    lines += ["", "| model | tree | first start | second start | (imports) |", "|---|---|---:|---:|---:|"]
    for model in arguments.models:
        command = ("-m", "inflight", "generate", "-m", model, "Hi", "--max-tokens", "1", "--quiet")
        first: dict[str, list[float]] = {name: [] for name in trees}
        second: dict[str, list[float]] = {name: [] for name in trees}
        imports = []
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as cache:
                    folder = Path(cache) / "inflight"
                    folder.mkdir()
                    for library in cache_folder().glob("*.so"):
                        (folder / library.name).symlink_to(library)
                    imports.append(seconds(tree, cache, "-c", "import torch, transformers"))
                    first[name].append(seconds(tree, cache, *command))
                    second[name].append(seconds(tree, cache, *command))
        spent = statistics.median(imports)
        for name in trees:
            medians = [statistics.median(each[name]) - spent for each in (first, second)]
            lines.append(f"| {Path(model).name} | {name} | {medians[0]:.2f} | {medians[1]:.2f} | {spent:.2f} |")
            print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "start.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
