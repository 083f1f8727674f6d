"""Filters match transformers for each row of a batch, and the kernel draws from the tokens that they keep."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inflight.contracts.api.params import SamplingParams
from inflight.execution.sampling import sampler as sampler_module
from inflight.execution.sampling import torch_sampling
from inflight.execution.sampling.torch_sampling import draw, min_p_filter, top_k_filter, top_p_filter
from tests.execution.sampled_rows import (
    FILTERED,
    GREEDY,
    INFINITY,
    LARGEST_UNIFORM,
    Row,
    of_transformers,
    random_logits,
    sample,
)


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
def test_filters_keep_the_tokens_that_transformers_keeps(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: type, values: list[float], vocab_size: int, scale: float
) -> None:
    """One batch has all values of the parameter, one for each row."""
    logits = random_logits(len(values), vocab_size, scale)
    filtered = ours(logits, torch.tensor(values)[:, None])
    for row, value in enumerate(values):
        assert torch.equal(filtered[row], theirs(value)(None, logits[row : row + 1])[0]), value


def test_filters_ignore_tokens_dropped_by_an_earlier_filter() -> None:
    """Fewer tokens are left than top-k keeps, and the dropped ones do not count in the sum of top-p."""
    logits = torch.tensor([[2.0, -INFINITY, 1.0, 0.0, -INFINITY]])
    assert torch.equal(top_k_filter(logits, torch.tensor([[4]]), 4), logits)
    assert torch.equal(top_p_filter(logits, torch.tensor([[0.9999]])), logits)
    assert torch.equal(min_p_filter(logits, torch.tensor([[1e-6]])), logits)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab_size", [11, 500])
def test_each_row_of_a_batch_is_filtered_as_transformers_would(vocab_size: int, seed: int) -> None:
    """The order is temperature, top-k, top-p, min-p; one batch mixes all kinds of parameters and greedy rows."""
    rows = [row for params in FILTERED for row in (Row(params), Row(GREEDY))]
    logits = random_logits(len(rows), vocab_size, seed=seed)
    with (
        mock.patch.object(sampler_module, "has_kernels", return_value=False),
        mock.patch.object(torch_sampling, "draw", wraps=draw) as spy,
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
def test_the_kernel_inverts_the_filtered_distribution(
    params: SamplingParams, vocab_size: int, dtype: torch.dtype
) -> None:
    """Each uniform number lies within its token's share of the cumulative distribution, and no share is skipped."""
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
