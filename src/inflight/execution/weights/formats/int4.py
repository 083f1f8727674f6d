"""int4: weights of four bits in groups of 32 inputs that share a scale, and activations rounded to int8 in the same
groups, just before the product. Sums within a group are exact. The head, which chooses the tokens and often is the
embedding, too, has int8."""

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from inflight.execution.weights.formats.int8 import FORMAT as INT8
from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.panels import PANEL_OUTPUTS, PanelLinear, has_panels
from inflight.execution.weights.prepacked_linear import PrepackedLinear, WeightLayout

GROUP = 32
"""Inputs that share a scale."""
MIDDLE = 8
"""Numbers run from 0 to 15, and this one stands for 0."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried for a group, as shares of the one that reaches its largest weight; the best one is kept. A
smaller scale cuts that weight off and is finer for all others."""
ROWS_AT_ONCE = 2048
"""Rows of a weight that are rounded at a time, so that a large one never exists as a whole in float32."""
VECTOR = 16
"""Outputs that are multiplied at once."""


class _Int4(WeightFormat):
    """See `WeightFormat`."""

    name = "int4"
    is_lossless = False
    largest_error = 0.9

    @property
    def of_head(self) -> WeightFormat:
        """See `WeightFormat`."""
        return INT8

    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """See `WeightFormat`."""
        return Int4PanelLinear

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """See `WeightFormat`."""
        reason = super().why_unusable(model)
        if reason is None and not has_panels(torch.uint8):
            reason = "needs a CPU with AVX-512 VNNI and a C++ compiler"
        return reason


class Int4PanelLinear(PanelLinear):
    """Our kernel, which also rounds the activations."""

    def _panels_of(self, weight: torch.Tensor) -> torch.Tensor:
        return panels_of(*round_weight(weight))

    def layout(self) -> WeightLayout | None:
        """See `PrepackedLinear`. Its elements have no memory of their own."""
        return None


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[out, in]` as numbers `[out, groups, GROUP]` uint8 from 0 to 15 and scales `[out, groups]` float16: an
    element is about `(number - MIDDLE) * scale`. The last group is filled up with zeros."""
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    numbers = torch.empty(num_outputs, num_groups, GROUP, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_groups, dtype=torch.float16)
    for first in range(0, num_outputs, ROWS_AT_ONCE):
        rows = functional.pad(weight[first : first + ROWS_AT_ONCE].float(), (0, num_groups * GROUP - num_inputs))
        some = slice(first, first + len(rows))
        numbers[some], scales[some] = _round_groups(rows.view(len(rows), num_groups, GROUP))
    return numbers, scales


def _round_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups `[…, GROUP]` float32 as numbers `[…, GROUP]` uint8 and scales `[…]` float16."""
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    best, numbers, scales = torch.full_like(largest, torch.inf), torch.zeros_like(groups), largest.half()
    for share in SHARES:  # the largest weight becomes number 0, the furthest from the middle
        scale = (largest * (share / -MIDDLE)).half()
        divisor = scale.float()
        rounded = (groups / divisor).nan_to_num(0).round().clamp(-MIDDLE, MIDDLE - 1)
        error = (rounded * divisor - groups).square().sum(dim=-1, keepdim=True)
        is_better = error < best
        best = error.where(is_better, best)
        numbers, scales = rounded.where(is_better, numbers), scale.where(is_better, scales)
    return (numbers + MIDDLE).to(torch.uint8), scales[..., 0]


def dequantised(numbers: torch.Tensor, scales: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """The weight `[out, in]` float32 that numbers and scales stand for: the definition of the format."""
    return ((numbers.float() - MIDDLE) * scales.float()[..., None]).flatten(1)[:, :num_inputs]


def panels_of(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers `[out, groups, GROUP]` and scales `[out, groups]` in the layout of `kernels/four_bits.h`."""
    num_panels = -(-len(numbers) // PANEL_OUTPUTS)
    missing = num_panels * PANEL_OUTPUTS - len(numbers)
    numbers = functional.pad(numbers, (0, 0, 0, 0, 0, missing), value=MIDDLE)
    scales = functional.pad(scales, (0, 0, 0, missing))
    num_groups, group = numbers.shape[1:]
    # panel, vector, output, group, eight inputs, half, four inputs
    pieces = numbers.view(num_panels, PANEL_OUTPUTS // VECTOR, VECTOR, num_groups, group // 8, 2, 4)
    both = pieces[..., 0, :] | pieces[..., 1, :] << 4
    weights = both.permute(0, 3, 1, 4, 2, 5).reshape(num_panels, num_groups, -1)
    of_groups = scales.view(num_panels, PANEL_OUTPUTS, num_groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([weights, of_groups], dim=-1)


FORMAT = _Int4()
