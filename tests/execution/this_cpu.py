"""Features of this CPU, for tests that need them."""

import pytest
import torch

from inflight.execution.kernels import has_panels
from inflight.execution.weights.grouped_linear import can_group
from inflight.execution.weights.int8_linear import int8_layer, sums_int8


def needs(dtype: torch.dtype) -> None:
    """Skip the test unless linear layers of a dtype are prepacked here; uint8 stands for weights in groups."""
    if dtype == torch.bfloat16 and not (has_panels(dtype) or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("this CPU has no layers of bfloat16")
    if dtype == torch.int8 and not sums_int8(int8_layer()):
        pytest.skip("this CPU cuts off sums of int8")
    if dtype == torch.uint8 and not can_group():
        pytest.skip("our kernels are not available")
