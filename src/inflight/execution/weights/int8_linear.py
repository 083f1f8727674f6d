"""Linear layers with int8 weights, scaled per output channel; each row of activations is rounded to int8 with its own
scale. Sums are exact."""

from dataclasses import replace
from functools import cache

import torch
from torch.nn import functional

from inflight.execution.grouped.rounding import channels_of, rounded_channels
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.kernels import has_panels
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear, panels_of
from inflight.execution.weights.prepacked_linear import PrepackedLinear, WeightLayout

ZERO_POINT = 128
"""oneDNN multiplies unsigned by signed integers, so activations are shifted by this zero point."""


def int8_layer() -> type[PrepackedLinear]:
    """The layer for this CPU."""
    return Int8PanelLinear if has_panels(torch.int8) else Int8OneDnnLinear


@cache
def sums_int8(kind: type[PrepackedLinear]) -> bool:
    """Whether a kind of int8 layer is correct on this CPU, tested with the largest values. Without VNNI oneDNN adds
    pairs of products in 16 bits, which overflow."""
    layer = kind(torch.ones(32, 64), None)
    return bool((layer(torch.ones(2, 64)) - 64).abs().max() < 1e-2)


def _channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[out, in]` as int8, and the scales of its outputs: its own, if it has them."""
    return channels_of(weight) if isinstance(weight, GroupedWeight) else rounded_channels(weight)


class Int8PanelLinear(PanelLinear):
    """Our kernel, which also rounds the activations."""

    def _panels_of(self, weight: torch.Tensor) -> torch.Tensor:
        """See `PanelLinear`."""
        rounded, self.scales = _channels(weight)
        return panels_of(rounded)


class Int8OneDnnLinear(OneDnnLinear):
    """oneDNN's integer product; torch rounds and scales. The weight is `[in, out]`."""

    scales: torch.Tensor

    def _prepack(self, weight: torch.Tensor) -> None:
        """See `PrepackedLinear`."""
        rounded, self.scales = _channels(weight)
        self.prepacked = torch.ops.onednn.qlinear_prepack(rounded, None)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `OneDnnLinear`."""
        rows = x.reshape(-1, self.in_features).float()
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        scales = scales.where(scales.isfinite(), torch.nan)
        rounded = (rows / scales.clamp_min(1e-30)).round().nan_to_num().add(ZERO_POINT).to(torch.uint8)
        zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        sums = torch.ops.onednn.qlinear_pointwise(
            *(rounded, 1.0, ZERO_POINT, self.prepacked, self.scales, zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        out = sums * scales
        if self.bias is not None:
            out += self.bias
        return _activate(out, self.activation, self.variant).to(x.dtype).view(*x.shape[:-1], -1)

    def layout(self) -> WeightLayout | None:
        """See `PrepackedLinear`."""
        layout = super().layout()
        if layout is None:
            return None
        rows, columns = layout.column_places, layout.row_places
        return replace(layout, row_places=rows, column_places=columns, scales=self.scales)


def _activate(x: torch.Tensor, activation: str, variant: str) -> torch.Tensor:
    """An activation (see `PrepackedLinear`) of each element of `[…]`, float32."""
    if activation == "gelu":
        return functional.gelu(x, approximate=variant)
    if activation == "swish":
        return functional.silu(x)
    return x.relu() if activation == "relu" else x
