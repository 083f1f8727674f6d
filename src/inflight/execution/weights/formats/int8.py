"""int8: weights have a scale for each output channel, and each row of activations is rounded to int8, with a scale of
its own, just before the product. Sums are exact."""

from dataclasses import replace
from functools import cache

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear, has_panels, panels_of
from inflight.execution.weights.prepacked_linear import PrepackedLinear, WeightLayout

ROWS_AT_ONCE = 8192
"""Rows of a weight that are rounded at a time, so that a large head never exists as a whole in float32."""
ZERO_POINT = 128
"""oneDNN multiplies unsigned by signed integers, so rounded activations are shifted by this."""


class _Int8(WeightFormat):
    """See `WeightFormat`."""

    name = "int8"
    is_lossless = False

    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """See `WeightFormat`."""
        return Int8PanelLinear if has_panels(torch.int8) else Int8OneDnnLinear

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """See `WeightFormat`."""
        reason = super().why_unusable(model)
        if reason is None and not sums_int8():
            reason = "needs a CPU that sums int8 in 32 bits (VNNI or AMX)"
        return reason


@cache
def sums_int8() -> bool:
    """Whether int8 layers are right on this CPU, tried with the largest numbers that they can meet. Without VNNI oneDNN
    adds pairs of products in 16 bits, which overflow."""
    layer = FORMAT.prepack_linear(torch.ones(32, 64), None)
    return bool((layer(torch.ones(2, 64)) - 64).abs().max() < 1e-2)


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[out, in]` as int8 `[out, in]` in [-127, 127], and the scales of its output channels `[out]`
    float32."""
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE].float()
        scale = rows.abs().amax(dim=1) / 127
        scales[first : first + ROWS_AT_ONCE] = scale
        rounded[first : first + ROWS_AT_ONCE] = (rows / scale.clamp_min(1e-30)[:, None]).round()
    return rounded, scales


class Int8PanelLinear(PanelLinear):
    """Our kernel, which also rounds the activations."""

    def _panels_of(self, weight: torch.Tensor) -> torch.Tensor:
        rounded, self.scales = round_weight(weight)
        return panels_of(rounded)


class Int8OneDnnLinear(OneDnnLinear):
    """oneDNN's product of integers; the rounding and scaling around it are torch's. The weight lies as `[in, out]`."""

    scales: torch.Tensor

    def _prepack(self, weight: torch.Tensor) -> None:
        rounded, self.scales = round_weight(weight)
        self.prepacked = torch.ops.onednn.qlinear_prepack(rounded, None)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
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
    if activation == "gelu":
        return functional.gelu(x, approximate=variant)
    if activation == "swish":
        return functional.silu(x)
    return x.relu() if activation == "relu" else x


FORMAT = _Int8()
