"""Weights in the model's own dtype."""

import torch

from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear, has_panels
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class _Plain(WeightFormat):
    """See `WeightFormat`."""

    name = "plain"
    is_lossless = True

    def prepack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> PrepackedLinear:
        """See `WeightFormat`."""
        kind = PanelLinear if has_panels(weight.dtype) else OneDnnLinear
        return kind(weight, bias, activation, variant)


FORMAT = _Plain()
