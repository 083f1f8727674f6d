"""Weights rounded to bfloat16 and stored in the model's dtype. An example of a weight method."""

import torch

from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.formats.plain import FORMAT as PLAIN
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class _Bfloat16(WeightFormat):
    """See `WeightFormat`."""

    name = "bfloat16"
    is_lossless = False

    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """See `WeightFormat`."""
        return PLAIN.layer_class(dtype)

    def prepack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> PrepackedLinear:
        """See `WeightFormat`."""
        return super().prepack_linear(weight.bfloat16().to(weight.dtype), bias, activation, variant)


FORMAT = _Bfloat16()
