"""A packed linear layer alone: our panels compared with oneDNN's prepacked operators.

python benchmarks/linear_layers.py

For each shape and number of rows, both kinds run in turn through the same weights, which exceed the last-level cache,
as in a model. Reported are medians of the repetitions; a ratio above 1 means that panels are faster.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import RESULTS, describe_machine
from inflight.execution.kernels import has_panels
from inflight.execution.weights.int8_linear import Int8OneDnnLinear, Int8PanelLinear
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear

SHAPES = ((576, 1536), (1024, 3072), (2048, 8192), (1024, 30000))
"""Numbers of inputs and outputs."""
NUMBERS_OF_ROWS = (2, 8, 16, 32, 64, 128, 512)
NUM_WEIGHTS = 200_000_000
"""The size of all layers of a shape together."""
SECONDS = 0.05
"""The least duration of a repetition."""


def seconds_of(layers: Sequence[PrepackedLinear], x: torch.Tensor, num_runs: int = 1) -> float:
    """Return the seconds of one layer on `x` `[rows, inputs]`, averaged over several runs through all layers."""
    start = time.perf_counter()
    for _ in range(num_runs):
        for layer in layers:
            layer(x)
    return (time.perf_counter() - start) / num_runs / len(layers)


def lines_of(num_inputs: int, num_outputs: int, *, quantized: bool, num_repeats: int) -> list[str]:
    """Return the table's lines for one shape."""
    num_layers = max(1, min(24, NUM_WEIGHTS // (num_inputs * num_outputs)))
    weights = [(torch.randn(num_outputs, num_inputs) * 0.02).bfloat16() for _ in range(num_layers)]
    kinds = (Int8PanelLinear, Int8OneDnnLinear) if quantized else (PanelLinear, OneDnnLinear)
    ours, theirs = ([kind(weight, None) for weight in weights] for kind in kinds)
    lines = []
    for num_rows in NUMBERS_OF_ROWS:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        num_runs = max(1, int(SECONDS / num_layers / max(seconds_of(layers, x) for layers in (ours, theirs))))
        pairs = [(seconds_of(ours, x, num_runs), seconds_of(theirs, x, num_runs)) for _ in range(num_repeats)]
        our_time, their_time = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        operations = 2 * num_rows * num_inputs * num_outputs / our_time
        size = num_inputs * num_outputs * (1 if quantized else 2) / our_time
        case = f"{'int8' if quantized else 'bfloat16'} | {num_inputs}x{num_outputs} | {num_rows}"
        times = f"{our_time * 1e6:,.0f} | {their_time * 1e6:,.0f} | {ratio:.2f}"
        lines.append(f"| {case} | {times} | {operations / 1e9:,.0f} | {size / 1e9:.1f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help=f"the output file; default: {RESULTS.name}/linear-layers.md")
    arguments = parser.parse_args()
    if not all(map(has_panels, (torch.bfloat16, torch.int8))):
        sys.exit("this CPU has no panels to compare")
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        sys.exit("on this CPU oneDNN has no bfloat16 to compare with")
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        "# Linear layers: our panels beside oneDNN's prepacked operators",
        "",
        f"Activations in bfloat16, {torch.get_num_threads()} threads. {machine}; torch: {torch.__version__}.",
        "",
        "| weights | shape | rows | panels µs | oneDNN µs | times as fast | GFLOP/s | GB/s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for quantized in (False, True):
        for shape in SHAPES:
            lines += lines_of(*shape, quantized=quantized, num_repeats=arguments.repeats)
    (arguments.output or RESULTS / "linear-layers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
