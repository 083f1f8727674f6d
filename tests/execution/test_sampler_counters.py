"""A draw depends only on its counters (seed, index and position), and each combination gives another random number."""

from unittest import mock

import numpy as np
import pytest
import torch

from inflight.contracts.api.params import SamplingParams
from inflight.execution.sampling import sampler as sampler_module
from inflight.execution.sampling.sampler import counter_uniform
from tests.execution.goodness_of_fit import assert_fits
from tests.execution.sampled_rows import FILTERED, GREEDY, LARGEST_UNIFORM, NUM_SLOTS, Row, random_logits, sample

SEEDS = np.array([0, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 12345678901], dtype=np.uint64)
INDICES = np.arange(8, dtype=np.uint64)
POSITIONS = np.arange(4096, dtype=np.uint64)


def streams() -> np.ndarray:
    """Uniform numbers `[seeds, indices, positions]`."""
    counters = np.meshgrid(SEEDS, INDICES, POSITIONS, indexing="ij")
    return counter_uniform(*(counter.ravel() for counter in counters)).reshape(counters[0].shape)


def test_random_numbers_are_uniform_on_zero_to_one() -> None:
    uniform = streams()
    assert uniform.dtype == np.float32
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert_fits(np.bincount((uniform.ravel() * 1000).astype(int), minlength=1000), np.full(1000, 1 / 1000))
    for stream in uniform.reshape(-1, len(POSITIONS)):
        assert_fits(np.bincount((stream * 64).astype(int), minlength=64), np.full(64, 1 / 64))


def test_the_largest_counters_stay_below_one() -> None:
    largest = np.full(1, 2**64 - 1, dtype=np.uint64)
    assert 0 <= counter_uniform(largest, largest, largest)[0] < 1
    with mock.patch.object(sampler_module, "_mix", return_value=largest):
        assert counter_uniform(largest, largest, largest)[0] == LARGEST_UNIFORM


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "index", "position"])
def test_random_numbers_of_neighbouring_counters_are_independent(axis: int) -> None:
    """Pairs that differ in one counter fill the unit square evenly and are uncorrelated."""
    uniform = np.moveaxis(streams(), axis, 0).astype(np.float64)
    first, second = uniform[:-1].ravel(), uniform[1:].ravel()
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    assert_fits(np.bincount(cells, minlength=256), np.full(256, 1 / 256))
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / len(first) ** 0.5


def test_no_two_streams_are_equal_or_shifted_copies() -> None:
    uniform = streams().reshape(-1, len(POSITIONS))
    assert len(np.unique(uniform, axis=0)) == len(uniform) == len(SEEDS) * len(INDICES)
    windows = np.lib.stride_tricks.sliding_window_view(uniform, 3, axis=1).reshape(-1, 3)
    assert len(np.unique(windows, axis=0)) == len(windows)


def test_exchanging_counters_gives_another_number() -> None:
    """A chain that mixed its three counters symmetrically would give sequence 3 at position 5 the number of 5 at 3."""
    a, b, c = (np.array([value], dtype=np.uint64) for value in (3, 5, 7))
    orders = [(a, b, c), (a, c, b), (b, a, c), (b, c, a), (c, a, b), (c, b, a)]
    assert len({float(counter_uniform(*order)[0]) for order in orders}) == len(orders)


@pytest.mark.parametrize("vocab_size", [7, 100, 1031])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_the_same_alone_or_in_any_batch_order_and_slot(dtype: torch.dtype, vocab_size: int) -> None:
    every = [GREEDY, *FILTERED, SamplingParams(min_tokens=4)]
    rows = [Row(every[i % len(every)], i % 7, seed=i // 2, index=i % 3, stop_token_ids=[1, 2]) for i in range(42)]
    logits = random_logits(len(rows), vocab_size).to(dtype)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    random = np.random.default_rng(0)
    for _ in range(5):
        order = random.permutation(len(rows))[: random.integers(2, len(rows) + 1)]
        slots = random.permutation(NUM_SLOTS)[: len(order)].tolist()
        assert sample(logits[order], [rows[i] for i in order], slots) == [alone[i] for i in order]


def test_a_draw_depends_on_the_output_position_and_not_on_the_prompt_length() -> None:
    logits = random_logits(1, 1000, scale=0.1)
    tokens = [sample(logits, [Row(output_position=3, prompt_len=length)]) for length in (1, 2, 50)]
    assert tokens[0] == tokens[1] == tokens[2]
