"""Attention over paged memory: `reference` against a loop in float64, `torch` and `cpu` against `reference`.

`tests.execution.paged_world` describes what they run.
"""

import copy
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
    torch_backend,
)
from inflight.execution.attention.interface import KVStorage
from tests.execution.paged_world import (
    Call,
    Part,
    World,
    backend_of,
    make,
    make_world,
    memories,
    naive,
    random_specs,
    relative_error,
    rows,
    run,
    worlds,
)

FAST_BACKENDS = ["torch", "cpu", "cpu, int8 cache", "cpu, int4 cache"]
BACKENDS = ["reference", *FAST_BACKENDS]
PLAIN_LAYOUT = ["reference", "torch"]
NAN = float("nan")
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 2e-2

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, value_head_size=8, scale=0.3)
SPECS = {
    "plain": PLAIN,
    "multi-head": replace(PLAIN, num_kv_heads=4),
    "multi-query": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, window=5),
    "bidirectional": replace(PLAIN, is_causal=False),
    "bidirectional window": replace(PLAIN, is_causal=False, window=5),
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


@contextmanager
def small_limits() -> Iterator[None]:
    """Treat short spans as long ones, which are attended in several slices."""
    with (
        mock.patch.object(torch_backend, "MAX_SHARED_QUERY_LEN", 2),
        mock.patch.object(torch_backend, "MAX_QUERIES_AT_ONCE", 5),
    ):
        yield


HISTORY = make_world(
    block_size=4,
    steps=[
        [Part(0, 0, 9), Part(1, 0, 3)],
        [Part(2, 8, 14), Part(1, 3, 4), Part(0, 9, 13)],  # the third starts after two blocks of the first
        [Part(0, 13, 14), Part(1, 4, 5), Part(2, 14, 15), Part(3, 4, 9)],
        [Part(3, 9, 19), Part(2, 15, 16)],
    ],
    shared=[(0, 0), (1, 0), (0, 2), (1, 1)],
    seed=0,
)
"""Whole prompts, chunks, decodes and mixtures of them. Two sequences begin with blocks of others, one of them with a
block that is completed in the same step."""


# ------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("name", SPECS)
def test_reference_is_the_definition(name: str) -> None:
    call = Call(SPECS[name], HISTORY, torch.float32, seed=1)
    for step, outputs in zip(HISTORY.steps, run(backend_of("reference", HISTORY), HISTORY, [call]), strict=True):
        assert outputs[0].shape == (len(rows(call.queries, step)), call.spec.num_heads, call.spec.value_head_size)
        assert relative_error(outputs[0], naive(HISTORY, call, step)) < 1e-5


@settings(max_examples=15)
@given(worlds(longest_span=6), random_specs(), st.integers(0, 100))
def test_reference_is_the_definition_for_random_histories(world: World, spec: AttentionSpec, seed: int) -> None:
    call = Call(spec, world, torch.float32, seed)
    for step, outputs in zip(world.steps, run(backend_of("reference", world), world, [call]), strict=True):
        assert relative_error(outputs[0], naive(world, call, step)) < 1e-5


# -------------------------------------------------------------- fast backends against the definition


def assert_same_as_reference(
    name: str, world: World, specs: Sequence[AttentionSpec], dtype: torch.dtype, seed: int
) -> None:
    calls = [Call(spec, world, dtype, seed + number) for number, spec in enumerate(specs)]
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    expected_calls, expected_dtype = calls, dtype
    if "cache" in name:  # whose products round to bfloat16, where the CPU multiplies that
        tolerance, expected_dtype = BFLOAT16_TOLERANCE, torch.float32
        expected_calls = [rounded_call(call, as_int8 if "int8" in name else as_int4) for call in calls]
    expected = run(backend_of("reference", world, expected_dtype), world, expected_calls)
    actual = run(backend_of(name, world, dtype), world, calls)
    for number, step in enumerate(world.steps):
        for call, ours, theirs in zip(calls, actual[number], expected[number], strict=True):
            assert ours.dtype == dtype
            assert relative_error(ours, theirs) < tolerance, f"step {number} {step}, {call.spec}"


def rounded_call(call: Call, rounded: Callable[[Tensor], Tensor]) -> Call:
    """The call in float32, with keys and values as a cache of few bits has them."""
    same = copy.copy(call)
    same.queries, same.keys, same.values = call.queries.float(), rounded(call.keys), rounded(call.values)
    return same


def as_int8(vectors: Tensor) -> Tensor:
    """`[…, size]` rounded with one scale for each vector."""
    scales = vectors.float().abs().amax(-1, keepdim=True) / 127
    return (vectors.float() / scales).round() * scales


def as_int4(vectors: Tensor, *, is_rotated: bool = True) -> Tensor:
    """The same in sixteen steps, rotated by Hadamard matrices, with the scale of the least squared error."""
    size = vectors.shape[-1]
    run = size & -size if is_rotated else 1
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < run:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / math.sqrt(2)
    rotated = (vectors.double().unflatten(-1, (-1, run)) @ matrix).flatten(-2)
    steps = rotated / (rotated.abs().amax(-1, keepdim=True) / 7.5)
    numbers = (steps + 7.5).round().clamp(0, 15) - 7.5
    scales = (rotated * numbers).sum(-1, keepdim=True) / numbers.square().sum(-1, keepdim=True)
    return ((numbers * scales).unflatten(-1, (-1, run)) @ matrix).flatten(-2).float()


def test_rotation_keeps_an_outlier_from_taking_the_steps_of_other_dimensions() -> None:
    world = make_world(16, [[Part(0, 0, 64)]], [(0, 0)], seed=0)
    call = Call(replace(PLAIN, head_size=64, value_head_size=64), world, torch.float32, seed=1)
    call.values[..., 5] *= 30
    reference = backend_of("reference", world)
    ((expected,),) = run(reference, world, [call])
    ((unrotated,),) = run(reference, world, [rounded_call(call, partial(as_int4, is_rotated=False))])
    ((ours,),) = run(backend_of("cpu, int4 cache", world), world, [call])
    assert relative_error(ours, expected) < relative_error(unrotated, expected) / 2


def test_backends_match_their_names() -> None:
    assert isinstance(backend_of("torch", HISTORY), TorchAttention)
    assert isinstance(backend_of("cpu", HISTORY), CpuAttention)
    assert isinstance(backend_of("auto", HISTORY), CpuAttention)
    assert type(backend_of("reference", HISTORY)) is ReferenceAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_backends_match_the_reference(backend: str, name: str, dtype: torch.dtype) -> None:
    assert_same_as_reference(backend, HISTORY, [SPECS[name]], dtype, seed=2)


@settings(max_examples=120)
@given(worlds(), st.lists(random_specs(), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_backends_match_the_reference_for_random_histories(
    backend: str, world: World, specs: list[AttentionSpec], dtype: torch.dtype
) -> None:
    assert_same_as_reference(backend, world, specs, dtype, seed=3)


@settings(max_examples=80)
@given(worlds(longest_span=24), st.lists(random_specs(), min_size=1, max_size=2))
def test_torch_matches_the_reference_when_spans_are_sliced(world: World, specs: list[AttentionSpec]) -> None:
    with small_limits():
        assert_same_as_reference("torch", world, specs, torch.float32, seed=4)


@pytest.mark.parametrize(
    "name", ["plain", "window", "chunk", "softcap", "sinks", "wider values", "bidirectional", "bidirectional window"]
)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_backends_match_the_reference_beyond_the_real_limits_of_torch(backend: str, name: str) -> None:
    """A whole prompt, a later chunk and a short prompt, the first two longer than a slice of queries."""
    long = torch_backend.MAX_QUERIES_AT_ONCE + 3
    assert torch_backend.MAX_SHARED_QUERY_LEN < torch_backend.MAX_QUERIES_AT_ONCE
    steps = [
        [Part(0, 0, 7), Part(1, 0, long)],
        [Part(2, 0, torch_backend.MAX_SHARED_QUERY_LEN + 1), Part(0, 7, 7 + long)],
    ]
    world = make_world(16, steps, [(0, 0), (1, 0), (2, 0)], seed=0)
    assert_same_as_reference(backend, world, [SPECS[name]], torch.float32, seed=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_backends_match_the_reference_for_decodes_of_all_lengths(backend: str, name: str, dtype: torch.dtype) -> None:
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
    """Values prepared once per step for one layer are reused only by layers for which they are correct."""
    assert_same_as_reference(backend, HISTORY, [SPECS[first], SPECS[second], SPECS[first]], torch.float32, seed=7)


TILE_BLOCKS = 16  # of 16 tokens, which the kernel computes separately, once for all sequences that share them


def tiles_shared(prefix: int, lengths: Sequence[int], then: Sequence[int]) -> World:
    """One sequence computes `prefix` blocks. The others start after them, first with spans of these lengths, then with
    spans of the second lengths."""
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
def test_sequences_can_share_whole_tiles(world: str, name: str, dtype: torch.dtype) -> None:
    """The kernel reads shared tiles once for all sequences; unwritten memory is NaN."""
    spec = SPECS[name]
    for wide in (spec, replace(spec, window=None if spec.window is None else 300)):
        call = Call(wide, SHARED_TILES[world], dtype, seed=11)
        expected = run(backend_of("reference", SHARED_TILES[world], dtype), SHARED_TILES[world], [call])
        actual = run(backend_of("cpu", SHARED_TILES[world], dtype), SHARED_TILES[world], [call], fill=NAN)
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours[0], theirs[0]) < (FLOAT32_TOLERANCE if dtype == torch.float32 else 2e-2)


# ------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "cpu, int8 cache", "cpu, int4 cache"])
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 40), (24, 39)])
@pytest.mark.parametrize("window", [None, 20, 50, 300])
def test_a_token_has_the_same_bits_alone_and_among_others(
    window: int | None, block_size: int, head_size: int, backend: str, dtype: torch.dtype
) -> None:
    """With a window, tokens that are computed together begin to look back at different keys. Together they are written
    into the cache together, too."""
    spec, length = replace(PLAIN, window=window, head_size=head_size, value_head_size=head_size), 600
    together = make_world(block_size, [[Part(0, 0, length)]], [(0, 0)], seed=5)
    alone = make_world(block_size, [[Part(0, i, i + 1)] for i in range(length)], [(0, 0)], seed=5)
    outputs = []
    for world in (together, alone):
        call = Call(spec, world, dtype, seed=12)
        outputs.append(torch.cat([step[0] for step in run(backend_of(backend, world, dtype), world, [call])]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", ["cpu", "cpu, int8 cache", "cpu, int4 cache"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 8])
def test_rows_of_all_numbers_have_the_same_bits_even_with_denormal_products(backend: str, group_size: int) -> None:
    """Another unit of the CPU may multiply few rows, and treat tiny numbers differently."""
    spec = replace(PLAIN, num_heads=2 * group_size, head_size=64, value_head_size=64, scale=8.0)
    outputs = []
    for spans in ([Part(0, 299, 300)], [Part(0, 260, 300)]):
        world = make_world(16, [[Part(0, 0, spans[0].start)], spans], [(0, 0)], seed=5)
        call = Call(spec, world, torch.bfloat16, seed=12)
        call.values *= 1e-37
        outputs.append(run(backend_of(backend, world, torch.bfloat16), world, [call])[1][0][-1])
    assert torch.equal(*outputs)


# --------------------------------------------------------------------------- foreign memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_memory_that_a_span_has_not_written_never_matters(backend: str, name: str, dtype: torch.dtype) -> None:
    """Unowned blocks and the unwritten rest of a span's own last block give the same result with NaN and with zeros."""
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
@pytest.mark.parametrize("backend", ["reference", *FAST_BACKENDS])
def test_nans_of_a_sequence_do_not_reach_other_sequences(backend: str, name: str) -> None:
    """A request whose states have become NaN does not affect other requests in the batch, even of the same size."""
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


def filled_cache(backend: AttentionBackend, num_blocks: int, spec: AttentionSpec) -> KVStorage:
    """A cache in which every element is different, so that any misplaced write shows."""
    cache = backend.allocate(num_blocks, spec)
    for tensor in memories(cache):
        numbers = (
            torch.arange(tensor.numel()) if tensor.is_floating_point() else torch.arange(tensor.numel()) % 251 - 125
        )
        tensor.copy_(numbers.view_as(tensor))
    return cache


def copy_of(cache: KVStorage) -> KVStorage:
    return KVStorage(cache.keys.clone(), cache.values.clone())


@pytest.mark.parametrize("backend_name", PLAIN_LAYOUT)
def test_a_token_is_written_to_its_place_and_nowhere_else(backend_name: str) -> None:
    num_blocks, block_size, spec = 6, 4, replace(PLAIN, value_head_size=12)
    world = World(block_size, ((Part(0, 2, 6), Part(1, 0, 1)),), (0, 1), ((array("i", [5, 2]), array("i", [3])),))
    backend = make(backend_name, torch.float32, block_size)
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
def test_writes_to_place_minus_one_change_no_block(backend_name: str) -> None:
    """Padding rows write to -1 and change no block; other tokens are written as usual."""
    num_blocks, block_size = 4, 4
    world = World(block_size, ((Part(0, 0, 4),),), (0,), ((array("i", [2]),),))
    batch = world.batch(world.steps[0])
    padded = replace(batch, groups=(replace(batch.groups[0], cache_indices=torch.tensor([-1, 2 * 4 + 1, -1, -1])),))
    backend = make(backend_name, torch.float32, block_size)
    cache = filled_cache(backend, num_blocks, PLAIN)
    expected = copy_of(cache)
    keys, values = torch.randn(4, PLAIN.num_kv_heads, 8), torch.randn(4, PLAIN.num_kv_heads, 8)
    expected.keys[2, 1], expected.values[2, 1] = keys[1], values[1]
    backend.begin_step(padded)
    backend.write(cache, keys, values, PLAIN)
    assert torch.equal(cache.keys[:num_blocks], expected.keys[:num_blocks])
    assert torch.equal(cache.values[:num_blocks], expected.values[:num_blocks])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_copy_blocks_copies_whole_blocks_and_changes_no_others(backend_name: str) -> None:
    num_blocks, spec = 6, replace(PLAIN, value_head_size=12)
    backend = make(backend_name, torch.float32, 4)
    cache = filled_cache(backend, num_blocks, spec)
    before = [memory.clone() for memory in memories(cache)]
    backend.copy_blocks(cache, [(1, 4), (3, 0), (1, 5)])
    sources = [3, 1, 2, 3, 1, 1]
    for memory, former in zip(memories(cache), before, strict=True):
        assert torch.equal(memory[:num_blocks], former[sources])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_bytes_per_block_is_the_real_size_of_a_block(backend_name: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=24, value_head_size=16, scale=1.0)
    for block_size in (4, 16, 24):
        backend = make(backend_name, dtype, block_size)
        cache = backend.allocate(6, spec)
        assert backend.bytes_per_block(spec) * 7 == sum(memory.nbytes for memory in memories(cache))
        if "cpu" not in backend_name or block_size == 16:
            itemsize, scales = (dtype.itemsize, 0) if "cache" not in backend_name else (int(backend_name[8]) / 8, 2 * 4)
            assert backend.bytes_per_block(spec) == block_size * 2 * ((24 + 16) * itemsize + scales)
