"""Edge cases of the sampler: greedy rows, broken logits, forbidden tokens, extreme temperatures."""

import pytest
import torch

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import Span
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler
from tests.execution.sampled_rows import (
    CPU,
    FILTERED,
    GREEDY,
    INFINITY,
    Row,
    assign,
    pack,
    random_logits,
    sample,
    sample_many,
)

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_logit(dtype: torch.dtype) -> None:
    logits = random_logits(40, 1000).to(dtype)
    tokens = sample(logits, [Row(GREEDY, output_position=i) for i in range(40)])
    assert torch.equal(logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0], logits.amax(-1))


def test_greedy_ignores_temperature_and_filters() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5, seed=7)
    logits = random_logits(8, 100)
    assert sample(logits, [Row(params)] * 8) == logits.argmax(-1).tolist()


def test_no_rows_give_no_tokens() -> None:
    span = Span(0, 0, 0, [1, 2], num_logit_rows=0, sequence_length=5)
    assert Sampler(1, CPU).sample(torch.empty(0, 50), pack([span])) == []


@pytest.mark.parametrize("params", [GREEDY, *FILTERED], ids=repr)
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "one infinity", "nothing allowed"])
def test_a_non_finite_row_is_invalid_and_does_not_affect_its_neighbours(broken: str, params: SamplingParams) -> None:
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_stop_tokens_are_chosen_only_after_min_tokens(min_tokens: int, temperature: float) -> None:
    """The logits favour only stop tokens at every output position."""
    params = SamplingParams(temperature=temperature, min_tokens=min_tokens, max_tokens=None)
    stop_token_ids = {3, 8}
    logits = torch.zeros(7, 10)
    logits[:, [3, 8]] = 100.0
    rows = [Row(params, position, stop_token_ids=stop_token_ids) for position in range(7)]
    tokens = sample(logits, rows)
    assert [token in stop_token_ids for token in tokens] == [position >= min_tokens for position in range(7)]


def test_stop_tokens_are_forbidden_only_for_sequences_that_must_not_stop() -> None:
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


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300])
def test_a_temperature_close_to_zero_takes_the_most_likely_token(temperature: float) -> None:
    logits = random_logits(20, 50)
    tokens = sample(logits, [Row(SamplingParams(temperature=temperature), seed=seed) for seed in range(20)])
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1e300])
def test_a_huge_temperature_makes_all_allowed_tokens_equally_likely(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=500, max_tokens=None)
    tokens = sample_many(torch.tensor([3.0, 0.0, 2.0, -5.0, 1.0]), Row(params, stop_token_ids=[4]), 500)
    assert set(tokens) == {0, 1, 2, 3}
