"""`plain_linear` rounds once, as torch does, wherever it runs."""

import pytest
import torch
from torch.nn import functional

from inflight.execution import plain_linear as module
from inflight.execution.plain_linear import PlainLinears, plain_linear


@pytest.fixture(params=["AVX2", "AVX512"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    monkeypatch.setattr(module, "VALUES_AT_ONCE", 64 * 100)  # several pieces, the last of them smaller
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_round_once(capability: str, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 11, 64).to(dtype), torch.randn(250, 64).to(dtype)
    bias = torch.randn(250).to(dtype) if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    given = plain_linear(x, weight, bias)
    assert given.dtype == dtype
    assert (given.double() - exact).norm() / exact.norm() < 4 * torch.finfo(dtype).eps
    with PlainLinears():
        layer = torch.nn.Linear(64, 250, bias=has_bias, dtype=dtype).requires_grad_(False)
        layer.weight.data, layer.bias = weight, None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        assert torch.equal(layer(x), given)
