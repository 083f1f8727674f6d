"""The sampler: filters are transformers' own, draws follow the distribution and depend on their counters alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.execution import sampler as sampler_module
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampler import (
    INVALID_TOKEN,
    Sampler,
    counter_uniform,
    draw,
    min_p_filter,
    top_k_filter,
    top_p_filter,
)
from inflight.params import SamplingParams
from inflight.plan import Span, StepPlan

CPU = torch.device("cpu")
NUM_SLOTS = 64
ALPHA_QUANTILE = 3.719  # of the standard normal distribution: chi-square tests fail by chance once in 10,000
LARGEST_UNIFORM = 1 - 2**-24
GREEDY = SamplingParams(temperature=0)
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Row:
    """One row of logits: whose it is, and how far its sequence has come."""

    params: SamplingParams = field(default_factory=SamplingParams)
    output_position: int = 0
    seed: int = 0
    index: int = 0
    prompt_len: int = 5
    stop_token_ids: Sequence[int] = ()


def sample(logits: Tensor, rows: Sequence[Row], slots: Sequence[int] | None = None) -> list[int]:
    """The tokens of a step of decodes, one for each row."""
    slots = range(len(rows)) if slots is None else slots
    sampler = Sampler(NUM_SLOTS, CPU)
    spans = []
    for row, slot in zip(rows, slots, strict=True):
        assign(sampler, slot, row)
        start = row.prompt_len + row.output_position - 1
        spans.append(Span(slot, slot, start, [0], num_logit_rows=1, sequence_length=start + 1))
    return sampler.sample(logits, pack(spans))


def sample_many(logits: Tensor, row: Row, num_positions: int) -> list[int]:
    """The first `num_positions` tokens of one sequence whose logits `[V]` are the same everywhere."""
    sampler = Sampler(1, CPU)
    assign(sampler, 0, row)
    start = row.prompt_len - 1
    span = Span(0, 0, start, [0] * num_positions, num_logit_rows=num_positions, sequence_length=start + num_positions)
    return sampler.sample(logits.expand(num_positions, -1), pack([span]))


def assign(sampler: Sampler, slot: int, row: Row) -> None:
    sampler.assign(
        slot,
        row.params,
        seed=row.seed,
        index=row.index,
        token_ids=[0] * (row.prompt_len + row.output_position),
        prompt_len=row.prompt_len,
        stop_token_ids=row.stop_token_ids,
    )


def pack(spans: Sequence[Span]) -> RaggedBatch:
    return RaggedBatch.pack(StepPlan(tuple(spans), ()), block_size=16, device=CPU)


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def of_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits `[V]` as transformers shapes them, in the order of `model.generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits[None])[0]


# ----------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("vocab_size", [2, 17, 1000])
@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (lambda logits, k: top_k_filter(logits, k, int(k.max())), TopKLogitsWarper, [1, 2, 10, 999, 1000, 5000]),
        (top_p_filter, TopPLogitsWarper, [1e-6, 0.01, 0.3, 0.5, 0.9, 0.999]),
        (min_p_filter, MinPLogitsWarper, [1e-4, 0.01, 0.1, 0.5, 0.9, 1.0]),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_keep_what_transformers_keeps(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: type, values: list[float], vocab_size: int, scale: float
) -> None:
    """All values of the parameter in one batch: each row has its own."""
    logits = random_logits(len(values), vocab_size, scale)
    filtered = ours(logits, torch.tensor(values)[:, None])
    for row, value in enumerate(values):
        assert torch.equal(filtered[row], theirs(value)(None, logits[row : row + 1])[0]), value


def test_filters_leave_what_an_earlier_one_dropped() -> None:
    """Fewer tokens are left than top-k keeps, and the dropped ones have no part in top-p's sum."""
    logits = torch.tensor([[2.0, -INFINITY, 1.0, 0.0, -INFINITY]])
    assert torch.equal(top_k_filter(logits, torch.tensor([[4]]), 4), logits)
    assert torch.equal(top_p_filter(logits, torch.tensor([[0.9999]])), logits)
    assert torch.equal(min_p_filter(logits, torch.tensor([[1e-6]])), logits)


FILTERED = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=-1),
    SamplingParams(top_k=1, temperature=2.0),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=3.0, top_p=0.5, min_p=0.3),
    SamplingParams(temperature=0.3, top_k=10**6, top_p=0.999, min_p=1e-5),
    SamplingParams(temperature=1.2, top_k=3, min_p=0.9),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab_size", [11, 500])
def test_rows_of_a_batch_are_shaped_as_transformers_would_shape_each(vocab_size: int, seed: int) -> None:
    """Temperature, top-k, top-p, min-p, in this order; parameters of all kinds and greedy rows mixed in one batch."""
    rows = [row for params in FILTERED for row in (Row(params), Row(GREEDY))]
    logits = random_logits(len(rows), vocab_size, seed=seed)
    with (
        mock.patch.object(sampler_module, "has_kernels", return_value=False),
        mock.patch.object(sampler_module, "draw", wraps=draw) as spy,
    ):
        tokens = sample(logits, rows)
    probabilities = spy.call_args.args[0]
    assert len(probabilities) == len(FILTERED)
    for number, params in enumerate(FILTERED):
        expected = of_transformers(logits[2 * number], params).softmax(-1)
        assert torch.equal(probabilities[number] > 0, expected > 0), params
        torch.testing.assert_close(probabilities[number], expected, rtol=1e-4, atol=1e-9)
    assert tokens[1::2] == logits[1::2].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [11, 500, 20_000])
@pytest.mark.parametrize("params", FILTERED, ids=str)
def test_the_kernel_inverts_the_distribution_that_the_filters_shape(
    params: SamplingParams, vocab_size: int, dtype: torch.dtype
) -> None:
    """Each uniform number lies within its token's share of the cumulative distribution, and no share is left out."""
    logits = random_logits(1, vocab_size).to(dtype)
    assert sampler_module.has_kernels(logits)
    shaped = logits.float() / params.temperature
    if params.top_k > 0:
        shaped = top_k_filter(shaped, torch.tensor([[params.top_k]]), params.top_k)
    if params.top_p < 1:
        shaped = top_p_filter(shaped, torch.tensor([[params.top_p]]))
    if params.min_p > 0:
        shaped = min_p_filter(shaped, torch.tensor([[params.min_p]]))
    expected = shaped[0].softmax(-1).double()
    uniform = torch.linspace(0, LARGEST_UNIFORM, 2001)
    columns = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
    by_row = [torch.full((2001,), value) for value in columns]
    tokens = torch.ops.inflight.sample(logits.expand(2001, -1).contiguous(), *by_row, uniform)
    ends = expected.cumsum(0)[tokens]
    assert (expected[tokens] > 0).all()
    assert (uniform <= ends + 1e-5).all()
    assert (uniform >= ends - expected[tokens] - 1e-5).all()


# ------------------------------------------------------------------------- greedy, and broken rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_logit(dtype: torch.dtype) -> None:
    logits = random_logits(40, 1000).to(dtype)
    tokens = sample(logits, [Row(GREEDY, output_position=i) for i in range(40)])
    assert torch.equal(logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0], logits.amax(-1))


def test_greedy_ignores_all_that_shapes_a_distribution() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5, seed=7)
    logits = random_logits(8, 100)
    assert sample(logits, [Row(params)] * 8) == logits.argmax(-1).tolist()


def test_no_rows_no_tokens() -> None:
    span = Span(0, 0, 0, [1, 2], num_logit_rows=0, sequence_length=5)
    assert Sampler(1, CPU).sample(torch.empty(0, 50), pack([span])) == []


@pytest.mark.parametrize("params", [GREEDY, *FILTERED], ids=repr)
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "one infinity", "nothing allowed"])
def test_a_row_that_is_not_finite_is_invalid_and_leaves_its_neighbours_alone(
    broken: str, params: SamplingParams
) -> None:
    rows = [Row(params, seed=seed) for seed in range(3)] + [Row(SamplingParams(top_k=5, top_p=0.9)), Row(GREEDY)]
    logits = random_logits(len(rows), 50)
    expected = sample(logits, rows)
    assert INVALID_TOKEN not in expected
    values = {
        "one NaN": (7, NAN),
        "all NaN": (..., NAN),
        "one infinity": (7, INFINITY),
        "nothing allowed": (..., -INFINITY),
    }
    place, value = values[broken]
    logits[1, place] = value
    assert sample(logits, rows) == [expected[0], INVALID_TOKEN, *expected[2:]]


def test_tokens_that_a_model_itself_forbids_do_not_make_a_row_invalid() -> None:
    logits = torch.full((2, 6), -INFINITY)
    logits[:, 4] = 0.5
    assert sample(logits, [Row(GREEDY), Row()]) == [4, 4]


# ---------------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_stop_tokens_are_chosen_only_after_min_tokens(min_tokens: int, temperature: float) -> None:
    """The logits ask for nothing but stop tokens, at every output position."""
    params = SamplingParams(temperature=temperature, min_tokens=min_tokens, max_tokens=None)
    stop_token_ids = {3, 8}
    logits = torch.zeros(7, 10)
    logits[:, [3, 8]] = 100.0
    rows = [Row(params, position, stop_token_ids=stop_token_ids) for position in range(7)]
    tokens = sample(logits, rows)
    assert [token in stop_token_ids for token in tokens] == [position >= min_tokens for position in range(7)]


def test_stop_tokens_are_forbidden_only_to_those_who_must_not_stop() -> None:
    must_go_on = Row(SamplingParams(temperature=0, min_tokens=9), 2, stop_token_ids=[1])
    may_stop = Row(SamplingParams(temperature=0), 2, stop_token_ids=[1])
    other_stop = Row(SamplingParams(temperature=0, min_tokens=9), 2, stop_token_ids=[2])
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
    assert sample(logits, [must_go_on, may_stop, other_stop, must_go_on]) == [2, 1, 1, 2]
    assert torch.equal(logits, torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4, 1)), "the caller's logits are not touched"


def test_a_slot_forgets_its_last_sequence() -> None:
    sampler = Sampler(1, CPU)
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    batch = pack([Span(0, 0, 4, [0], num_logit_rows=1, sequence_length=5)])
    params = SamplingParams(temperature=5.0, top_k=2, top_p=0.5, min_p=0.5, min_tokens=9)
    assign(sampler, 0, Row(params, stop_token_ids=[1]))
    assert sampler.sample(logits, batch) == [2]
    assign(sampler, 0, Row(SamplingParams(temperature=0, min_tokens=9), stop_token_ids=[2]))
    assert sampler.sample(logits, batch) == [1]


# ------------------------------------------------------------------------- extreme temperatures


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300])
def test_a_temperature_close_to_zero_takes_the_most_likely_token(temperature: float) -> None:
    logits = random_logits(20, 50)
    tokens = sample(logits, [Row(SamplingParams(temperature=temperature), seed=seed) for seed in range(20)])
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1e300])
def test_a_huge_temperature_makes_all_tokens_equal_but_forbidden_ones(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=500, max_tokens=None)
    tokens = sample_many(torch.tensor([3.0, 0.0, 2.0, -5.0, 1.0]), Row(params, stop_token_ids=[4]), 500)
    assert set(tokens) == {0, 1, 2, 3}


# --------------------------------------------------------------------------------- distributions


def chi_square_limit(degrees_of_freedom: int) -> float:
    """What chi-square exceeds with probability 1e-4 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - spread + ALPHA_QUANTILE * spread**0.5) ** 3


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square goodness of fit. Outcomes expected fewer than 10 times count as one."""
    assert not counts[probabilities == 0].any(), "an impossible outcome happened"
    expected = probabilities * counts.sum()
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] < 10:
            counts, expected = counts[:-1], expected[:-1]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(len(expected) - 1)


def test_the_chi_square_limit_is_that_of_the_tables() -> None:
    for degrees_of_freedom, tabulated in ((10, 35.56), (100, 161.32)):
        assert chi_square_limit(degrees_of_freedom) == pytest.approx(tabulated, rel=0.02)


SKEWED = torch.tensor([5.0, 4.0, 3.5, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -4.0])
DISTRIBUTIONS = {
    "uniform": (torch.zeros(10), SamplingParams()),
    "skewed": (SKEWED, SamplingParams()),
    "skewed, backwards": (SKEWED.flip(0), SamplingParams()),
    "two tokens": (torch.tensor([0.0, 2.0]), SamplingParams()),
    "large vocabulary": (random_logits(1, 2000, scale=1.0)[0], SamplingParams()),
    "hot": (SKEWED, SamplingParams(temperature=2.5)),
    "cold": (SKEWED, SamplingParams(temperature=0.5)),
    "top_k": (SKEWED, SamplingParams(top_k=4)),
    "top_p": (SKEWED, SamplingParams(top_p=0.85)),
    "min_p": (SKEWED, SamplingParams(min_p=0.1)),
    "all filters": (random_logits(1, 300)[0], SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02)),
    "bfloat16": (SKEWED.bfloat16(), SamplingParams(temperature=1.5)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tokens_follow_the_distribution_over_output_positions(name: str) -> None:
    logits, params = DISTRIBUTIONS[name]
    tokens = sample_many(logits, Row(params, seed=1), 20_000)
    probabilities = of_transformers(logits.float(), params).double().softmax(-1).numpy()
    assert_fits(np.bincount(tokens, minlength=len(logits)), probabilities)


@pytest.mark.parametrize("what", ["seed", "index"])
def test_tokens_follow_the_distribution_over_sequences(what: str) -> None:
    """The first token of many requests with consecutive seeds, and of many sequences of one request."""
    tokens: list[int] = []
    for first in range(0, 6400, NUM_SLOTS):
        rows = [Row(**{what: first + number}) for number in range(NUM_SLOTS)]
        tokens += sample(SKEWED.expand(NUM_SLOTS, -1), rows)
    assert_fits(np.bincount(tokens, minlength=len(SKEWED)), SKEWED.double().softmax(-1).numpy())


# ------------------------------------------------------------------------------ random numbers

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
    """Pairs that differ in one counter fill the unit square evenly, and do not correlate."""
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


# --------------------------------------------------------------------------------- invariance


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


def test_a_draw_depends_on_the_output_position_not_on_the_prompts_length() -> None:
    logits = random_logits(1, 1000, scale=0.1)
    tokens = [sample(logits, [Row(output_position=3, prompt_len=length)]) for length in (1, 2, 50)]
    assert tokens[0] == tokens[1] == tokens[2]


# ------------------------------------------------------------------------ what is never drawn


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-38, 1e-30, 1e-8, 1e-3, 0.3, 1.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-23, LARGEST_UNIFORM]) | st.floats(0, LARGEST_UNIFORM, width=32),
)
def test_a_token_without_probability_is_never_drawn(weights: list[float], uniform: float) -> None:
    """At both ends of [0, 1) and in between, for distributions that sum to one only roughly."""
    probabilities = torch.tensor([weights])
    probabilities /= probabilities.sum()
    if probabilities.any():  # 1e-38 alone among larger ones may vanish, but not all of them
        token = int(draw(probabilities, torch.tensor([uniform])))
        assert probabilities[0, token] > 0


def test_masked_tokens_are_not_drawn_at_the_ends_of_a_large_vocabulary() -> None:
    logits = random_logits(200, 50_000, seed=3)
    logits[:, :100] = logits[:, -100:] = -INFINITY
    probabilities = top_k_filter(logits, torch.full((200, 1), 50), 50).softmax(-1)
    for uniform in (0.0, LARGEST_UNIFORM):
        tokens = draw(probabilities, torch.full((200,), uniform))
        assert (probabilities.gather(-1, tokens[:, None]) > 0).all()


def test_top_k_of_one_always_takes_the_largest() -> None:
    logits = random_logits(1, 100, scale=0.01)[0]
    for temperature in (0.1, 1.0, 100.0):
        tokens = sample_many(logits, Row(SamplingParams(temperature=temperature, top_k=1)), 2000)
        assert set(tokens) == {int(logits.argmax())}


def test_draws_invert_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).repeat(6, 1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST_UNIFORM])
    assert draw(probabilities, uniform).tolist() == [0, 0, 2, 2, 3, 3]
