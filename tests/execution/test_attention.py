"""Attention over paged memory: `reference` against a loop in float64, `torch` and `cpu` against `reference`.

A `World` is what both run: sequences whose tokens are computed in spans over several steps, in scattered blocks that
some share, through several attention calls of different specs, as the layers of a model make them.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.execution.attention import (
    AttentionBackend,
    AttentionSpec,
    CpuAttention,
    ReferenceAttention,
    TorchAttention,
    make_backend,
    torch_backend,
)
from inflight.execution.attention.interface import PagedCache
from inflight.execution.attention.reference import may_attend, ragged_mask
from inflight.execution.ragged_batch import RaggedBatch
from inflight.plan import Span, StepPlan

CPU = torch.device("cpu")
FAST_BACKENDS = ["torch", "cpu"]
BACKENDS = ["reference", *FAST_BACKENDS]
PLAIN_LAYOUT = ["reference", "torch"]
NUM_CACHE_GROUPS = 2
FLOAT32_TOLERANCE = 1e-5
NAN = float("nan")
BFLOAT16_TOLERANCE = 2e-2

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, value_head_size=8, scale=0.3)
SPECS = {
    "plain": PLAIN,
    "multi-head": replace(PLAIN, num_kv_heads=4),
    "multi-query": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, window=5),
    "chunk": replace(PLAIN, chunk=6),
    "window and chunk": replace(PLAIN, window=4, chunk=7),
    "softcap": replace(PLAIN, softcap=1.5),
    "sinks": replace(PLAIN, has_sinks=True),
    "everything": replace(PLAIN, window=6, softcap=2.0, has_sinks=True, value_head_size=12, cache_group=1),
    "wider keys": replace(PLAIN, head_size=12, value_head_size=4),
    "wider values": replace(PLAIN, head_size=4, value_head_size=12),
    "scale": replace(PLAIN, scale=1.7),
    "second cache group": replace(PLAIN, cache_group=1),
}


# --------------------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Part:
    """The tokens `[start, end)` of one sequence, computed in one step."""

    sequence: int
    start: int
    end: int


@dataclass(frozen=True)
class World:
    """Steps of parts, and where the sequences lie: `tables[group][sequence]`.

    Sequences with the same `family` have the same keys, so they may share blocks: queries are everybody's own.
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
        return RaggedBatch.pack(StepPlan(spans, tables), self.block_size, CPU)


def make_world(block_size: int, steps: Sequence[Sequence[Part]], shared: Sequence[tuple[int, int]], seed: int) -> World:
    """Lay sequences out in shuffled blocks; `shared` gives each sequence's parent and the number of blocks of it
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
    """Prefills, chunks and decodes of up to five sequences in up to five steps. A sequence may start behind blocks of
    an earlier one, which that one has computed before or computes in that very step."""
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
        window=draw(st.none() | st.integers(1, 20)),
        chunk=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.sampled_from([0.5, 3.0])),
        has_sinks=draw(st.booleans()),
        cache_group=draw(st.integers(0, NUM_CACHE_GROUPS - 1)),
    )


class Call:
    """One attention call of a model: its spec, and the query, key and value that it makes for every token."""

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
    """The step's tokens of `[sequences, positions, …]`, end to end."""
    return torch.cat([states[part.sequence, part.start : part.end] for part in step])


def run(
    backend: AttentionBackend, world: World, calls: Sequence[Call], fill: float | None = None
) -> list[list[Tensor]]:
    """Each step's output of each call; all memory of the cache holds `fill` at first, if that is given."""
    caches = [backend.allocate(world.num_blocks, call.spec) for call in calls]
    if fill is not None:
        for cache in caches:
            cache.keys.fill_(fill)
            cache.values.fill_(fill)
    outputs = []
    for step in world.steps:
        backend.begin_step(world.batch(step))
        outputs.append([])
        for call, cache in zip(calls, caches, strict=True):
            backend.write(cache, rows(call.keys, step), rows(call.values, step), call.spec)
            outputs[-1].append(backend.attend(rows(call.queries, step), cache, call.spec, call.sinks))
    return outputs


def naive(world: World, call: Call, step: Sequence[Part]) -> Tensor:
    """The same from the definition: each query of each head over the keys of its own sequence, in float64."""
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
                    for other in range(position + 1)
                    if (spec.window is None or position - other < spec.window)
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
    return make_backend(name, CPU, dtype, world.block_size)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def small_limits() -> Iterator[None]:
    """Short spans count as long ones, and are attended in several slices."""
    with (
        mock.patch.object(torch_backend, "MAX_GROUPED_QUERY_LEN", 2),
        mock.patch.object(torch_backend, "MAX_QUERIES_AT_ONCE", 5),
    ):
        yield


HISTORY = make_world(
    block_size=4,
    steps=[
        [Part(0, 0, 9), Part(1, 0, 3)],
        [Part(2, 8, 14), Part(1, 3, 4), Part(0, 9, 13)],  # the third starts behind two blocks of the first
        [Part(0, 13, 14), Part(1, 4, 5), Part(2, 14, 15), Part(3, 4, 9)],
        [Part(3, 9, 19), Part(2, 15, 16)],
    ],
    shared=[(0, 0), (1, 0), (0, 2), (1, 1)],
    seed=0,
)
"""Whole prompts, chunks, decodes and mixtures of them; two sequences begin with blocks of others, one of them with a
block that is completed in that very step."""


# ------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("name", SPECS)
def test_reference_is_the_definition(name: str) -> None:
    call = Call(SPECS[name], HISTORY, torch.float32, seed=1)
    for step, outputs in zip(HISTORY.steps, run(backend_of("reference", HISTORY), HISTORY, [call]), strict=True):
        assert outputs[0].shape == (len(rows(call.queries, step)), call.spec.num_heads, call.spec.value_head_size)
        assert relative_error(outputs[0], naive(HISTORY, call, step)) < 1e-6


@settings(max_examples=15)
@given(worlds(longest_span=6), random_specs(), st.integers(0, 100))
def test_reference_is_the_definition_for_random_histories(world: World, spec: AttentionSpec, seed: int) -> None:
    call = Call(spec, world, torch.float32, seed)
    for step, outputs in zip(world.steps, run(backend_of("reference", world), world, [call]), strict=True):
        assert relative_error(outputs[0], naive(world, call, step)) < 1e-6


# -------------------------------------------------------------- the fast ones against the definition


def assert_same_as_reference(
    name: str, world: World, specs: Sequence[AttentionSpec], dtype: torch.dtype, seed: int
) -> None:
    calls = [Call(spec, world, dtype, seed + number) for number, spec in enumerate(specs)]
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    expected = run(backend_of("reference", world, dtype), world, calls)
    actual = run(backend_of(name, world, dtype), world, calls)
    for number, step in enumerate(world.steps):
        for call, ours, theirs in zip(calls, actual[number], expected[number], strict=True):
            assert ours.dtype == dtype
            assert relative_error(ours, theirs) < tolerance, f"step {number} {step}, {call.spec}"


def test_backends_are_what_their_names_say() -> None:
    assert isinstance(backend_of("torch", HISTORY), TorchAttention)
    assert isinstance(backend_of("cpu", HISTORY), CpuAttention)
    assert isinstance(backend_of("auto", HISTORY), CpuAttention)
    assert type(backend_of("reference", HISTORY)) is ReferenceAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_they_give_what_reference_gives(backend: str, name: str, dtype: torch.dtype) -> None:
    assert_same_as_reference(backend, HISTORY, [SPECS[name]], dtype, seed=2)


@settings(max_examples=120)
@given(worlds(), st.lists(random_specs(), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_they_give_what_reference_gives_for_random_histories(
    backend: str, world: World, specs: list[AttentionSpec], dtype: torch.dtype
) -> None:
    assert_same_as_reference(backend, world, specs, dtype, seed=3)


@settings(max_examples=80)
@given(worlds(longest_span=24), st.lists(random_specs(), min_size=1, max_size=2))
def test_torch_gives_what_reference_gives_when_spans_are_sliced(world: World, specs: list[AttentionSpec]) -> None:
    with small_limits():
        assert_same_as_reference("torch", world, specs, torch.float32, seed=4)


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "softcap", "sinks", "wider values"])
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_they_give_what_reference_gives_beyond_torchs_real_limits(backend: str, name: str) -> None:
    """A whole prompt, a later chunk and a short prompt, the first two longer than a slice of queries."""
    long = torch_backend.MAX_QUERIES_AT_ONCE + 3
    assert torch_backend.MAX_GROUPED_QUERY_LEN < torch_backend.MAX_QUERIES_AT_ONCE
    steps = [
        [Part(0, 0, 7), Part(1, 0, long)],
        [Part(2, 0, torch_backend.MAX_GROUPED_QUERY_LEN + 1), Part(0, 7, 7 + long)],
    ]
    world = make_world(16, steps, [(0, 0), (1, 0), (2, 0)], seed=0)
    assert_same_as_reference(backend, world, [SPECS[name]], torch.float32, seed=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_they_give_what_reference_gives_for_decodes_of_all_lengths(backend: str, name: str, dtype: torch.dtype) -> None:
    lengths = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 130]
    prefills = [Part(s, 0, length) for s, length in enumerate(lengths)]
    decodes = [Part(s, length, length + 1) for s, length in enumerate(lengths)]
    world = make_world(8, [prefills, decodes[::-1]], [(s, 0) for s in range(len(lengths))], seed=1)
    assert_same_as_reference(backend, world, [SPECS[name]], dtype, seed=6)


@pytest.mark.parametrize("second", ["softcap", "sinks", "second cache group", "multi-query", "window"])
@pytest.mark.parametrize("first", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_calls_of_one_step_with_different_specs_do_not_disturb_each_other(
    backend: str, first: str, second: str
) -> None:
    """What is prepared once a step for one layer is reused only by layers that it is right for."""
    assert_same_as_reference(backend, HISTORY, [SPECS[first], SPECS[second], SPECS[first]], torch.float32, seed=7)


TILE_BLOCKS = 16  # of 16 tokens: what the kernel computes apart, once for all that share it


def tiles_shared(prefix: int, lengths: Sequence[int], then: Sequence[int]) -> World:
    """One sequence computes `prefix` blocks; the others start behind them, all with spans of so many tokens, and then
    of so many more."""
    start = prefix * 16
    steps = [[Part(0, 0, start)]]
    for before, now in (([0] * len(lengths), lengths), (lengths, then)):
        firsts = [start + length for length in before]
        steps.append(
            [Part(s, first, first + length) for s, (first, length) in enumerate(zip(firsts, now, strict=True))]
        )
    return make_world(16, steps, [(0, 0)] + [(0, prefix)] * (len(lengths) - 1), seed=4)


SHARED_TILES = {
    "single decodes": tiles_shared(2 * TILE_BLOCKS, [1] * 7, [1] * 7),
    "odd spans": tiles_shared(TILE_BLOCKS, [3, 1, 2, 7, 16, 5], [1, 2, 1, 1, 9, 3]),
    "short and long spans": tiles_shared(2 * TILE_BLOCKS, [40, 1, 17, 2], [1, 30, 1, 16]),
    "not a whole tile": tiles_shared(2 * TILE_BLOCKS - 5, [6, 90, 1], [100, 1, 1]),
    "many rows": tiles_shared(TILE_BLOCKS, [1] * 50, [1] * 50),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["multi-head", "plain", "window", "chunk", "softcap", "everything"])
@pytest.mark.parametrize("world", SHARED_TILES)
def test_whole_tiles_that_sequences_share(world: str, name: str, dtype: torch.dtype) -> None:
    """The kernel reads them once for all; unwritten memory is NaN."""
    spec = SPECS[name]
    for wide in (spec, replace(spec, window=None if spec.window is None else 300)):
        call = Call(wide, SHARED_TILES[world], dtype, seed=11)
        expected = run(backend_of("reference", SHARED_TILES[world], dtype), SHARED_TILES[world], [call])
        actual = run(backend_of("cpu", SHARED_TILES[world], dtype), SHARED_TILES[world], [call], fill=NAN)
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours[0], theirs[0]) < (FLOAT32_TOLERANCE if dtype == torch.float32 else 2e-2)


# --------------------------------------------------------------------------- foreign memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_memory_that_a_span_has_not_written_never_matters(backend: str, name: str, dtype: torch.dtype) -> None:
    """Blocks of nobody and the unwritten rest of a span's own last block: full of NaN or of zeros, it's the same."""
    assert_foreign_memory_does_not_matter(HISTORY, SPECS[name], backend, dtype)


@settings(max_examples=40)
@given(worlds(longest_span=24), random_specs(), st.sampled_from(BACKENDS))
@example(HISTORY, PLAIN, "reference")
def test_memory_that_a_span_has_not_written_never_matters_in_random_histories(
    world: World, spec: AttentionSpec, backend: str
) -> None:
    with small_limits():
        assert_foreign_memory_does_not_matter(world, spec, backend, torch.float32)


def assert_foreign_memory_does_not_matter(world: World, spec: AttentionSpec, name: str, dtype: torch.dtype) -> None:
    call = Call(spec, world, dtype, seed=8)
    beside_zeros = run(backend_of(name, world, dtype), world, [call], fill=0.0)
    beside_nans = run(backend_of(name, world, dtype), world, [call], fill=float("nan"))
    for expected, actual in zip(beside_zeros, beside_nans, strict=True):
        assert torch.isfinite(expected[0]).all()
        assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_a_sequence_of_nans_is_alone_with_them(backend: str, name: str) -> None:
    """A request whose states have become NaN harms no request that runs beside it, even one of the same size."""
    steps = [[Part(s, 0, 5) for s in range(3)], [Part(s, 5, 6) for s in range(3)], [Part(s, 6, 20) for s in range(3)]]
    world = make_world(4, steps, [(s, 0) for s in range(3)], seed=2)
    call = Call(SPECS[name], world, torch.float32, seed=9)
    expected = run(backend_of(backend, world), world, [call])
    for states in (call.queries, call.keys, call.values):
        states[1] = float("nan")
    actual = run(backend_of(backend, world), world, [call])
    for step, ours, theirs in zip(steps, actual, expected, strict=True):
        owners = torch.tensor([part.sequence for part in step for _ in range(part.start, part.end)])
        assert torch.equal(ours[0][owners != 1], theirs[0][owners != 1])
        assert ours[0][owners == 1].isnan().all()


# ---------------------------------------------------------------------------- the cache itself


def filled_cache(backend: AttentionBackend, num_blocks: int, spec: AttentionSpec) -> PagedCache:
    """Every element of every block different from all others, so that any misplaced write shows."""
    cache = backend.allocate(num_blocks, spec)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.arange(1.0, tensor.numel() + 1).view_as(tensor))
    return cache


def copy_of(cache: PagedCache) -> PagedCache:
    return PagedCache(cache.keys.clone(), cache.values.clone())


@pytest.mark.parametrize("backend_name", PLAIN_LAYOUT)
def test_a_token_is_written_to_its_place_and_nowhere_else(backend_name: str) -> None:
    num_blocks, block_size, spec = 6, 4, replace(PLAIN, value_head_size=12)
    world = World(block_size, ((Part(0, 2, 6), Part(1, 0, 1)),), (0, 1), ((array("i", [5, 2]), array("i", [3])),))
    backend = make_backend(backend_name, CPU, torch.float32, block_size)
    cache = filled_cache(backend, num_blocks, spec)
    before = copy_of(cache)
    keys, values = torch.randn(5, spec.num_kv_heads, 8), torch.randn(5, spec.num_kv_heads, 12)
    backend.begin_step(world.batch(world.steps[0]))
    backend.write(cache, keys, values, spec)
    places = [(5, 2), (5, 3), (2, 0), (2, 1), (3, 0)]
    for row, (block, offset) in enumerate(places):
        assert torch.equal(cache.keys[block, offset], keys[row])
        assert torch.equal(cache.values[block, offset], values[row])
    for block in range(num_blocks):
        for offset in range(block_size):
            if (block, offset) not in places:
                assert torch.equal(cache.keys[block, offset], before.keys[block, offset])
                assert torch.equal(cache.values[block, offset], before.values[block, offset])


@pytest.mark.parametrize("backend_name", PLAIN_LAYOUT)
def test_place_minus_one_is_nobodys(backend_name: str) -> None:
    """Padding rows write to -1: no block changes; tokens beside them are written as ever."""
    num_blocks, block_size = 4, 4
    world = World(block_size, ((Part(0, 0, 4),),), (0,), ((array("i", [2]),),))
    batch = world.batch(world.steps[0])
    padded = replace(batch, groups=(replace(batch.groups[0], kv_slots=torch.tensor([-1, 2 * 4 + 1, -1, -1])),))
    backend = make_backend(backend_name, CPU, torch.float32, block_size)
    cache = filled_cache(backend, num_blocks, PLAIN)
    expected = copy_of(cache)
    keys, values = torch.randn(4, PLAIN.num_kv_heads, 8), torch.randn(4, PLAIN.num_kv_heads, 8)
    expected.keys[2, 1], expected.values[2, 1] = keys[1], values[1]
    backend.begin_step(padded)
    backend.write(cache, keys, values, PLAIN)
    assert torch.equal(cache.keys[:num_blocks], expected.keys[:num_blocks])
    assert torch.equal(cache.values[:num_blocks], expected.values[:num_blocks])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_copy_blocks_copies_whole_blocks_and_leaves_all_others(backend_name: str) -> None:
    num_blocks, spec = 6, replace(PLAIN, value_head_size=12)
    backend = make_backend(backend_name, CPU, torch.float32, 4)
    cache = filled_cache(backend, num_blocks, spec)
    before = copy_of(cache)
    backend.copy_blocks(cache, [(1, 4), (3, 0), (1, 5)])
    sources = [3, 1, 2, 3, 1, 1]
    assert torch.equal(cache.keys[:num_blocks], before.keys[sources])
    assert torch.equal(cache.values[:num_blocks], before.values[sources])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_bytes_per_block_is_what_a_block_takes(backend_name: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=24, value_head_size=16, scale=1.0)
    for block_size in (4, 16, 24):
        backend = make_backend(backend_name, CPU, dtype, block_size)
        cache = backend.allocate(6, spec)
        assert backend.bytes_per_block(spec) * 7 == cache.keys.nbytes + cache.values.nbytes
        if backend_name != "cpu" or block_size == 16:
            assert backend.bytes_per_block(spec) == block_size * 2 * (24 + 16) * dtype.itemsize


# ------------------------------------------------------------------------------------ masks


def drawn(mask: Tensor) -> list[str]:
    """A mask as text, a row for each query: `#` where it may see the key of that column."""
    return ["".join("#" if visible else "." for visible in row) for row in mask.tolist()]


def test_a_query_sees_itself_and_what_came_before() -> None:
    assert drawn(may_attend(torch.arange(4), torch.arange(4))) == [
        "#...",
        "##..",
        "###.",
        "####",
    ]


def test_a_window_counts_the_query_itself() -> None:
    assert drawn(may_attend(torch.arange(2, 6), torch.arange(6), window=2)) == [
        ".##...",
        "..##..",
        "...##.",
        "....##",
    ]
    assert drawn(may_attend(torch.arange(3), torch.arange(3), window=1)) == ["#..", ".#.", "..#"]


def test_chunks_are_aligned_to_the_sequence() -> None:
    assert drawn(may_attend(torch.arange(1, 7), torch.arange(7), chunk=3)) == [
        "##.....",
        "###....",
        "...#...",
        "...##..",
        "...###.",
        "......#",
    ]


def test_window_and_chunk_both_narrow() -> None:
    assert drawn(may_attend(torch.arange(6), torch.arange(6), window=2, chunk=4)) == [
        "#.....",
        "##....",
        ".##...",
        "..##..",
        "....#.",
        "....##",
    ]


def test_may_attend_takes_batches_of_positions() -> None:
    mask = may_attend(torch.tensor([[3], [1]]), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), window=3)
    assert [drawn(each) for each in mask] == [[".###"], ["##.."]]


RAGGED = World(4, ((Part(0, 2, 4), Part(1, 0, 3), Part(2, 4, 5)),), (0, 1, 2), ((array("i", [0, 1]),) * 3,))
"""The last two tokens of a prompt of four, a prompt of three, and a decode behind four tokens."""


def test_the_ragged_mask_keeps_sequences_apart() -> None:
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]))) == [
        "###.........",
        "####........",
        "....#.......",
        "....##......",
        "....###.....",
        ".......#####",
    ]


def test_the_ragged_mask_knows_windows_and_chunks() -> None:
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]), window=2)) == [
        ".##.........",
        "..##........",
        "....#.......",
        "....##......",
        ".....##.....",
        "..........##",
    ]
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]), chunk=2)) == [
        "..#.........",
        "..##........",
        "....#.......",
        "....##......",
        "......#.....",
        "...........#",
    ]
