"""Inputs for attention backends.

A `World` is sequences whose tokens are computed in spans over several steps, in scattered blocks that some share; a
`Call` is an attention call that a model's layer makes for each of them.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.attention import AttentionBackend, AttentionSpec, make_backend
from inflight.execution.attention.interface import KVStorage
from inflight.execution.ragged_batch import RaggedBatch

CPU = torch.device("cpu")
NUM_CACHE_GROUPS = 2


@dataclass(frozen=True)
class Part:
    """The tokens `[start, end)` of one sequence, computed in one step."""

    sequence: int
    start: int
    end: int


@dataclass(frozen=True)
class World:
    """Steps of parts, and where the sequences lie: `tables[group][sequence]`.

    Sequences with the same `family` have the same keys, so they may share blocks; each has its own queries.
    """

    block_size: int
    steps: tuple[tuple[Part, ...], ...]
    families: tuple[int, ...]
    tables: tuple[tuple[array, ...], ...]

    @property
    def num_blocks(self) -> int:
        return 1 + max(block for tables in self.tables for table in tables for block in table)

    @property
    def lengths(self) -> list[int]:
        parts = [part for step in self.steps for part in step]
        return [max(part.end for part in parts if part.sequence == s) for s in range(len(self.families))]

    def batch(self, step: Sequence[Part]) -> RaggedBatch:
        spans = tuple(Span(p.sequence, p.sequence, p.start, [0] * (p.end - p.start), 0, p.end) for p in step)
        tables = tuple(tuple(group[part.sequence] for part in step) for group in self.tables)
        return RaggedBatch.from_plan(StepPlan(spans, tables), self.block_size, CPU)


def make_world(block_size: int, steps: Sequence[Sequence[Part]], shared: Sequence[tuple[int, int]], seed: int) -> World:
    """Lay sequences out in shuffled blocks; `shared` gives each sequence's parent and the number of the parent's blocks
    that it shares (its own number and 0: none)."""
    parts = [part for step in steps for part in step]
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(part.end for part in parts if part.sequence == s) for s in range(len(shared))]
    sizes = [-(-length // block_size) for length in lengths]
    groups: list[tuple[array, ...]] = []
    for _ in range(NUM_CACHE_GROUPS):
        free = torch.randperm(sum(sizes) + 3, generator=generator).tolist()
        tables: list[array] = []
        for size, (parent, num_shared) in zip(sizes, shared, strict=True):
            common = list(tables[parent][:num_shared]) if num_shared else []
            tables.append(array("i", common + [free.pop() for _ in range(size - num_shared)]))
        groups.append(tuple(tables))
    families: list[int] = []
    for number, (parent, num_shared) in enumerate(shared):
        families.append(families[parent] if num_shared else number)
    return World(block_size, tuple(map(tuple, steps)), tuple(families), tuple(groups))


@st.composite
def worlds(draw: st.DrawFn, longest_span: int = 14) -> World:
    """Prefills, chunks and decodes of up to five sequences in up to five steps. A sequence may start after blocks of an
    earlier one, which were computed before or are computed in the same step."""
    block_size = draw(st.integers(1, 16))
    num_sequences = draw(st.integers(1, 5))
    shared = [(s, 0) for s in range(num_sequences)]
    computed = [0] * num_sequences
    steps: list[list[Part]] = []
    for _ in range(draw(st.integers(1, 5))):
        step: list[Part] = []
        for s in range(num_sequences):
            length = draw(st.sampled_from([0, 1, 1, 2, 3, longest_span // 2, longest_span]))
            if not length:
                continue
            if s and not computed[s]:
                parent = draw(st.integers(0, s - 1))
                num_shared = draw(st.integers(0, computed[parent] // block_size))
                shared[s] = (parent, num_shared) if num_shared else (s, 0)
                computed[s] = num_shared * block_size
            step.append(Part(s, computed[s], computed[s] + length))
            computed[s] += length
        if step:
            steps.append(draw(st.permutations(step)))
    if not steps:
        steps = [[Part(0, 0, 1)]]
        computed[0] = 1
    present = sorted({part.sequence for step in steps for part in step})
    number = {s: i for i, s in enumerate(present)}
    renumbered = [[replace(part, sequence=number[part.sequence]) for part in step] for step in steps]
    shared = [(number[shared[s][0]], shared[s][1]) for s in present]
    return make_world(block_size, renumbered, shared, seed=draw(st.integers(0, 10**6)))


@st.composite
def random_specs(draw: st.DrawFn) -> AttentionSpec:
    num_kv_heads = draw(st.integers(1, 3))
    return AttentionSpec(
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from([4, 8, 16])),
        value_head_size=draw(st.sampled_from([4, 8, 16])),
        scale=draw(st.sampled_from([0.1, 0.25, 1.0])),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 20)),
        chunk=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.sampled_from([0.5, 3.0])),
        has_sinks=draw(st.booleans()),
        cache_group=draw(st.integers(0, NUM_CACHE_GROUPS - 1)),
    )


class Call:
    """One attention call of a model: its spec, and its query, key and value for every token."""

    def __init__(self, spec: AttentionSpec, world: World, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        longest = max(world.lengths)
        num_sequences = len(world.families)
        self.spec = spec
        self.queries = random(num_sequences, longest, spec.num_heads, spec.head_size)
        self.keys = random(num_sequences, longest, spec.num_kv_heads, spec.head_size)[list(world.families)]
        self.values = random(num_sequences, longest, spec.num_kv_heads, spec.value_head_size)[list(world.families)]
        self.sinks = random(spec.num_heads) if spec.has_sinks else None


def rows(states: Tensor, step: Sequence[Part]) -> Tensor:
    """The tokens of the step from `[sequences, positions, …]`, concatenated."""
    return torch.cat([states[part.sequence, part.start : part.end] for part in step])


def run(
    backend: AttentionBackend, world: World, calls: Sequence[Call], fill: float | None = None
) -> list[list[Tensor]]:
    """The output of each call in each step; if `fill` is given, all cache memory holds it at first."""
    caches = [backend.allocate(world.num_blocks, call.spec) for call in calls]
    if fill is not None:
        for cache in caches:
            for memory in memories(cache):
                memory.fill_(fill if memory.is_floating_point() else 0)
    outputs = []
    for step in world.steps:
        backend.begin_step(world.batch(step))
        outputs.append([])
        for call, cache in zip(calls, caches, strict=True):
            backend.write(cache, rows(call.keys, step), rows(call.values, step), call.spec)
            outputs[-1].append(backend.attend(rows(call.queries, step), cache, call.spec, call.sinks))
    return outputs


def memories(cache: KVStorage) -> list[Tensor]:
    """All tensors of a cache, including the scales of rounded keys and values."""
    tensors = (cache.keys, cache.values, getattr(cache, "key_scales", None), getattr(cache, "value_scales", None))
    return [tensor for tensor in tensors if tensor is not None]


def naive(world: World, call: Call, step: Sequence[Part]) -> Tensor:
    """The same by definition: each query of each head over the keys of its own sequence, in float64."""
    spec = call.spec
    outputs = []
    for part in step:
        for position in range(part.start, part.end):
            for head in range(spec.num_heads):
                query = call.queries[part.sequence, position, head].double()
                kv_head = head // (spec.num_heads // spec.num_kv_heads)
                exponentials, total = [], 0.0
                visible = [
                    other
                    for other in range(position + 1 if spec.is_causal else part.end)
                    if (spec.window is None or abs(position - other) < spec.window)
                    and (spec.chunk is None or other // spec.chunk == position // spec.chunk)
                ]
                for other in visible:
                    score = float(query @ call.keys[part.sequence, other, kv_head].double()) * spec.scale
                    if spec.softcap is not None:
                        score = spec.softcap * math.tanh(score / spec.softcap)
                    exponentials.append(math.exp(score))
                    total += exponentials[-1]
                if call.sinks is not None:
                    total += math.exp(float(call.sinks[head]))
                output = torch.zeros(spec.value_head_size, dtype=torch.float64)
                for other, exponential in zip(visible, exponentials, strict=True):
                    output += exponential / total * call.values[part.sequence, other, kv_head].double()
                outputs.append(output)
    return torch.stack(outputs).unflatten(0, (-1, spec.num_heads))


def backend_of(name: str, world: World, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    return make(name, dtype, world.block_size)


def make(name: str, dtype: torch.dtype, block_size: int) -> AttentionBackend:
    backend, _, cache = name.partition(", ")
    return make_backend(backend, CPU, dtype, block_size, cache.removesuffix(" cache") or "auto")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
