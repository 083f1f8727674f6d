"""Weights in the model's own dtype."""

import torch

from inflight.execution.kernels import has_panels
from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class _Plain(WeightFormat):
    """See `WeightFormat`."""

    name = "plain"
    is_lossless = True

    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """See `WeightFormat`."""
        return PanelLinear if has_panels(dtype) else OneDnnLinear


FORMAT = _Plain()
