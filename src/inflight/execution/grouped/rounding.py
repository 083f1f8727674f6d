"""Quantizes weights in groups."""

from dataclasses import dataclass

import torch

from inflight.execution.grouped.weight import CHUNK, GroupedLayout, GroupedWeight, Groups, PackedMatrix
from inflight.execution.kernels import PANEL_OUTPUTS

ROWS_AT_ONCE = 8192
"""Rows quantized at a time, so that a large head never exists in float32 as a whole."""
LARGEST = 127
"""Of eight bits."""
MIDDLE_OF_EIGHT, MIDDLE_OF_FOUR = 128, 8
"""The code of 0."""
OUTPUTS_OF_QUADS = 16
"""Outputs of a panel whose numbers lie side by side (`kernels/grouped.h`)."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A quantization of weights.

    Attributes:
        bits: 4, or 8 with one scale for each output.
        group: inputs that share a scale of four bits; a multiple of 32.
        has_minima: whether a group of four bits has a minimum, too, instead of being rounded around 0.
    """

    bits: int
    group: int = CHUNK
    has_minima: bool = False

    @property
    def kind(self) -> str:
        """The name of such weights."""
        return f"int{self.bits}"

    def rounded(self, weight: torch.Tensor, dtype: torch.dtype) -> GroupedWeight:
        """Quantize a weight `[out, in]` or `[experts, out, in]`, float32, bfloat16 or float16; the result has the
        nominal `dtype`."""
        matrices = [weight] if weight.dim() == 2 else list(weight)
        if self.bits == 8:
            groups = [_eight_bits(each) for each in matrices]
            return GroupedWeight.from_groups(self.kind, groups, dtype, is_stacked=weight.dim() == 3)
        layout = GroupedLayout(
            4, self.group, has_minima=self.has_minima, middle=0 if self.has_minima else MIDDLE_OF_FOUR
        )
        packed = [PackedMatrix(torch.ops.inflight.round_grouped(layout.words, each.contiguous())) for each in matrices]
        return GroupedWeight(self.kind, layout, packed, weight.shape, dtype)


def rounded_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[out, in]` as int8 `[out, in]` in [-127, 127], and the scales of its output channels `[out]`
    float32."""
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE].float()
        scale = rows.abs().amax(dim=1) / LARGEST
        scales[first : first + ROWS_AT_ONCE] = scale
        rounded[first : first + ROWS_AT_ONCE] = (rows / scale.clamp_min(1e-30)[:, None]).round()
    return rounded, scales


def is_by_channels(weight: GroupedWeight) -> bool:
    """Whether a weight has eight bits, and one scale for each output."""
    layout = weight.grouping
    has_one_scale = (layout.fine, layout.has_minima, layout.code) == (0, False, "whole")
    covers_all = layout.coarse >= weight.matrix_shape[1] and weight.matrices[0].order is None
    return layout.bits == 8 and layout.middle == MIDDLE_OF_EIGHT and has_one_scale and covers_all


def channels_of(weight: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers `[out, in]` int8 and the scales `[out]` float32 of a weight for which `is_by_channels`."""
    num_outputs, num_inputs = weight.matrix_shape
    panels, layout = weight.matrices[0].panels, weight.grouping
    head = PANEL_OUTPUTS * (4 if layout.has_wide_scales else 2)
    scales = panels[:, :head].contiguous().view(torch.float32 if layout.has_wide_scales else torch.float16)
    halves, quads = PANEL_OUTPUTS // OUTPUTS_OF_QUADS, CHUNK // 4
    body = panels[:, head:].reshape(len(panels), -1, halves, quads, OUTPUTS_OF_QUADS, 4)
    numbers = body.permute(0, 2, 4, 1, 3, 5).reshape(len(panels) * PANEL_OUTPUTS, -1)[:num_outputs, :num_inputs]
    return (numbers ^ MIDDLE_OF_EIGHT).view(torch.int8), scales.flatten()[:num_outputs].float()


def _eight_bits(weight: torch.Tensor) -> Groups:
    """A weight `[out, in]` in eight bits, with one float32 scale for each output."""
    rounded, scales = rounded_channels(weight)
    whole = -(-weight.shape[1] // CHUNK) * CHUNK
    layout = GroupedLayout(8, whole, middle=MIDDLE_OF_EIGHT, has_wide_scales=True)
    return Groups(layout, rounded.view(torch.uint8) ^ MIDDLE_OF_EIGHT, scales[:, None])
