"""Tokens follow the distribution, and tokens without probability are never drawn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.api.params import SamplingParams
from inflight.execution.sampling.torch_sampling import draw, top_k_filter
from tests.execution.goodness_of_fit import assert_fits, chi_square_limit
from tests.execution.sampled_rows import (
    INFINITY,
    LARGEST_UNIFORM,
    NUM_SLOTS,
    Row,
    of_transformers,
    random_logits,
    sample,
    sample_many,
)


def test_the_chi_square_limit_matches_published_tables() -> None:
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


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-38, 1e-30, 1e-8, 1e-3, 0.3, 1.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-23, LARGEST_UNIFORM]) | st.floats(0, LARGEST_UNIFORM, width=32),
)
def test_a_token_without_probability_is_never_drawn(weights: list[float], uniform: float) -> None:
    """Tests both ends of [0, 1) and points between them, for distributions that sum to one only roughly."""
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
