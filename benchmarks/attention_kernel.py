"""The attention kernel alone: how close decodes come to reading the cache once, what sharing gains, and prefill.

python benchmarks/attention_kernel.py [--repeats 9] [--write]

- Decode: 32 sequences of 1,024 tokens; the bytes of keys and values that must be read, divided by the time, as a share
  of this machine's read bandwidth.
- A shared prefix: 16 sequences, each with a block of its own after a prefix so long that 16 copies of it are four times
  as large as the last-level cache: copies, against the same blocks for all. "One by one" is the baseline for sharing
  inside the kernel: each sequence in a step of its own over the shared blocks, which finds them in the processor's
  cache, as a kernel without sharing would. (The kernel has no switch that turns sharing off.)
- Prefill: one span of 2,048 tokens; only its causal products, in GFLOP/s, next to those of a linear layer.

In decodes a layer's cache is as cold as in a real step: several layers, with four times the last-level cache in all,
take turns (two in a prefill, which is bound by arithmetic). Bandwidth and arithmetic are measured between the
repetitions; medians are reported. Only attention is timed; the cache has synthetic content.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console
from rich.table import Table

from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.attention import AttentionSpec, CpuAttention, CpuCache
from inflight.execution.kernels import kernels_available
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.weights.formats import PLAIN
from inflight.profiling.machine import MachineMeter, last_level_cache_bytes

RESULTS = Path(__file__).resolve().parent / "results"
HEADS = {
    "GPT-2": AttentionSpec(num_heads=12, num_kv_heads=12, head_size=64, value_head_size=64, scale=0.125),
    "Qwen3-0.6B": AttentionSpec(num_heads=16, num_kv_heads=8, head_size=128, value_head_size=128, scale=128**-0.5),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
BLOCK_SIZE, TILE_SIZE = 16, 256
NUM_DECODES, DECODE_CONTEXT = 32, 1024
NUM_SHARING, CACHES_OF_COPIES, MIN_LAYERS = 16, 4, 2
PREFILL_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Decode:
    """One layer's decodes, each sequence with its own cache."""

    heads: str
    dtype: str
    num_bytes: int
    seconds: float
    read_bytes_per_second: float

    @property
    def share_of_bandwidth(self) -> float:
        return self.num_bytes / self.seconds / self.read_bytes_per_second


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Seconds of one layer's decodes of sequences with a common prefix, in three ways."""

    heads: str
    dtype: str
    num_prefix_tokens: int
    copies: float
    shared: float
    one_by_one: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """One layer's attention of a long span."""

    heads: str
    dtype: str
    num_operations: int
    seconds: float
    linear_operations_per_second: float


Results: TypeAlias = Mapping[str, Sequence[Decode] | Sequence[SharedPrefix] | Sequence[Prefill]]


class Scene:
    """A step over synthetic caches of several layers.

    Args:
        tables: the blocks of each sequence; all have the same number.
        num_tokens: tokens of each sequence, including those of the step.
        num_queries: how many of each sequence's last tokens are queries.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        num_queries: int = 1,
    ) -> None:
        self.spec = spec
        self.backend = CpuAttention(dtype, BLOCK_SIZE)
        num_blocks = len({block for table in tables for block in table})
        self.caches = [self._made_up_cache(num_blocks) for _ in range(MIN_LAYERS)]
        layer_bytes = num_blocks * self.backend.bytes_per_block(spec)
        while num_queries == 1 and len(self.caches) * layer_bytes < CACHES_OF_COPIES * last_level_cache_bytes():
            self.caches.append(self._made_up_cache(num_blocks))
        spans = [
            Span(number, number, num_tokens - num_queries, [0] * num_queries, 1, num_tokens)
            for number in range(len(tables))
        ]
        arrays = [array("i", table) for table in tables]
        self.together = _packed(spans, arrays)
        self.apart = [_packed([span], [table]) for span, table in zip(spans, arrays, strict=True)]
        input_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self.queries = torch.randn(self.together.num_tokens, spec.num_heads, spec.head_size).to(input_dtype)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values in one layer."""
        return self.backend.bytes_per_block(self.spec) / BLOCK_SIZE

    def attend(self) -> float:
        """Seconds of a layer, all sequences in one step."""
        self.backend.begin_step(self.together)
        start = time.perf_counter()
        for cache in self.caches:
            self.backend.attend(self.queries, cache, self.spec, None)
        return (time.perf_counter() - start) / len(self.caches)

    def attend_one_by_one(self) -> float:
        """Seconds of a layer, each sequence in a step of its own."""
        start = time.perf_counter()
        for cache in self.caches:
            for batch, queries in zip(self.apart, torch.split(self.queries, 1), strict=True):
                self.backend.begin_step(batch)
                self.backend.attend(queries, cache, self.spec, None)
        return (time.perf_counter() - start) / len(self.caches)

    def _made_up_cache(self, num_blocks: int) -> CpuCache:
        cache = self.backend.allocate(num_blocks, self.spec)
        for stored in (cache.keys, cache.values):
            block = torch.randn(stored.shape[1:]) * (1 if stored.is_floating_point() else 30)
            stored.copy_(block.to(stored.dtype))
        for scales in (cache.key_scales, cache.value_scales):
            if scales is not None:
                scales.fill_(1 / 30)
        return cache


def measure_decode(heads: str, dtype: str, repeats: int) -> Decode:
    """Measure decodes of 32 sequences of 1,024 tokens."""
    scene = Scene(HEADS[heads], DTYPES[dtype], _scattered(NUM_DECODES, DECODE_CONTEXT), DECODE_CONTEXT)
    meter = MachineMeter(torch.float32, PLAIN)
    (seconds,) = _medians(repeats, meter.measure, scene.attend)
    num_bytes = round(NUM_DECODES * DECODE_CONTEXT * scene.bytes_per_token)
    return Decode(heads, dtype, num_bytes, seconds, meter.machine().read_bytes_per_second)


def measure_shared_prefix(heads: str, dtype: str, repeats: int) -> SharedPrefix:
    """Measure decodes of 16 sequences with a common prefix and one block of their own each."""
    spec = HEADS[heads]
    bytes_per_tile = CpuAttention(DTYPES[dtype], BLOCK_SIZE).bytes_per_block(spec) * TILE_SIZE // BLOCK_SIZE
    num_tiles = -(-CACHES_OF_COPIES * last_level_cache_bytes() // (NUM_SHARING * bytes_per_tile))
    num_prefix_tokens = num_tiles * TILE_SIZE
    num_tokens, num_prefix_blocks = num_prefix_tokens + BLOCK_SIZE, num_prefix_tokens // BLOCK_SIZE
    prefix, *_ = _scattered(1, num_prefix_tokens)
    own = range(num_prefix_blocks, num_prefix_blocks + NUM_SHARING)
    copies = Scene(spec, DTYPES[dtype], _scattered(NUM_SHARING, num_tokens), num_tokens)
    shared = Scene(spec, DTYPES[dtype], [[*prefix, block] for block in own], num_tokens)
    seconds = _medians(repeats, lambda: None, copies.attend, shared.attend, shared.attend_one_by_one)
    return SharedPrefix(heads, dtype, num_prefix_tokens, *seconds)


def measure_prefill(heads: str, dtype: str, repeats: int) -> Prefill:
    """Measure a prefill of one span of 2,048 tokens."""
    spec = HEADS[heads]
    scene = Scene(spec, DTYPES[dtype], _scattered(1, PREFILL_LENGTH), PREFILL_LENGTH, PREFILL_LENGTH)
    meter = MachineMeter(scene.queries.dtype, PLAIN)
    (seconds,) = _medians(repeats, meter.measure, scene.attend)
    num_products = spec.num_heads * PREFILL_LENGTH * (PREFILL_LENGTH + 1) // 2
    num_operations = 2 * num_products * (spec.head_size + spec.value_head_size)
    return Prefill(heads, dtype, num_operations, seconds, meter.machine().operations_per_second)


def _medians(repeats: int, between: Callable[[], None], *ways: Callable[[], float]) -> list[float]:
    """Run all ways in turn and return the median result of each; the first run does not count."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        between()
        for way, so_far in zip(ways, seconds, strict=True):
            so_far.append(way())
    return [statistics.median(so_far[1:]) for so_far in seconds]


def _scattered(num_sequences: int, num_tokens: int) -> list[list[int]]:
    """Return block tables with as many blocks as the tokens need, each block used once, in random order."""
    blocks_each = -(-num_tokens // BLOCK_SIZE)
    blocks = list(range(num_sequences * blocks_each))
    random.Random(0).shuffle(blocks)
    return [blocks[first : first + blocks_each] for first in range(0, len(blocks), blocks_each)]


def _packed(spans: Sequence[Span], tables: Sequence["array[int]"]) -> RaggedBatch:
    return RaggedBatch.from_plan(StepPlan(tuple(spans), (tuple(tables),)), BLOCK_SIZE, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True)
class Section:
    """Returns a heading and a table."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich_table(self) -> Table:
        table = Table(header_style="bold", box=None, pad_edge=False)
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=number < 2)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> list[str]:
        lines = [f"## {self.title}", "", "| " + " | ".join(self.headings) + " |"]
        lines.append("|---|---" + "|---:" * (len(self.headings) - 2) + "|")
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


def decode_section(results: Sequence[Decode]) -> Section:
    rows = [
        (
            *(each.heads, each.dtype, f"{each.num_bytes / 2**20:.0f}", f"{each.seconds * 1e3:.2f}"),
            *(f"{each.num_bytes / each.seconds / 1e9:.1f}", f"{each.read_bytes_per_second / 1e9:.1f}"),
            f"{each.share_of_bandwidth:.0%}",
        )
        for each in results
    ]
    title = f"Decode: {NUM_DECODES} sequences of {DECODE_CONTEXT:,} tokens, one layer (goal: 70 %)"
    return Section(title, ("heads", "cache", "MiB", "ms", "GB/s", "machine GB/s", "share"), rows)


def shared_section(results: Sequence[SharedPrefix]) -> Section:
    rows = [
        (
            *(each.heads, each.dtype, f"{each.num_prefix_tokens:,}"),
            *(f"{seconds * 1e3:.3f}" for seconds in (each.copies, each.shared, each.one_by_one)),
            *(f"{each.copies / each.shared:.1f}", f"{each.one_by_one / each.shared:.1f}"),
        )
        for each in results
    ]
    title = f"A shared prefix: {NUM_SHARING} sequences, one layer (goals: copies : shared >= 5, 1 by 1 : shared >= 1)"
    headings = (
        *("heads", "cache", "prefix", "copies ms", "shared ms", "1 by 1 ms"),
        *("copies : shared", "1 by 1 : shared"),
    )
    return Section(title, headings, rows)


def prefill_section(results: Sequence[Prefill]) -> Section:
    rows = [
        (
            *(each.heads, each.dtype, f"{each.num_operations / 1e9:.1f}", f"{each.seconds * 1e3:.1f}"),
            f"{each.num_operations / each.seconds / 1e9:.0f}",
            f"{each.linear_operations_per_second / 1e9:.0f}",
        )
        for each in results
    ]
    title = f"Prefill: {PREFILL_LENGTH:,} tokens, one layer, causal products only"
    return Section(title, ("heads", "cache", "GFLOP", "ms", "GFLOP/s", "linear layer's"), rows)


def machine_description() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "machine": f"{model or platform.machine()}, {os.cpu_count()} processors",
        "last-level cache": f"{last_level_cache_bytes() / 2**20:.0f} MiB",
        "threads": str(torch.get_num_threads()),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def write_report(machine: dict[str, str], sections: Sequence[Section], results: Results) -> None:
    """Write `results/attention-kernel.json` and `.md`."""
    setting = [f"- {name}: {value}" for name, value in machine.items()]
    summary = "`python benchmarks/attention_kernel.py --write`; its first lines say what is measured and how."
    lines = ["# The attention kernel alone", "", summary, "", *setting, ""]
    lines += [line for section in sections for line in section.markdown()]
    data = {name: [asdict(each) for each in group] for name, group in results.items()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attention-kernel.md").write_text("\n".join(lines).rstrip() + "\n")
    (RESULTS / "attention-kernel.json").write_text(json.dumps({"machine": machine, **data}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="The attention kernel alone, against this machine.")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each measurement; medians are reported")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    arguments = parser.parse_args()
    if not kernels_available():
        sys.exit("the kernels cannot be built here")
    cases = [(heads, dtype, arguments.repeats) for heads in HEADS for dtype in DTYPES]
    console, machine = Console(), machine_description()
    console.print("\n".join(f"{name}: {value}" for name, value in machine.items()), highlight=False)
    decodes = [measure_decode(*case) for case in cases]
    shared = [measure_shared_prefix(*case) for case in cases]
    prefills = [measure_prefill(*case) for case in cases]
    sections = [decode_section(decodes), shared_section(shared), prefill_section(prefills)]
    for section in sections:
        console.print(f"\n{section.title}", highlight=False)
        console.print(section.rich_table())
    if arguments.write:
        write_report(machine, sections, {"decode": decodes, "shared_prefix": shared, "prefill": prefills})


if __name__ == "__main__":
    main()
