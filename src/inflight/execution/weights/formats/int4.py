"""int4: weights of four bits in groups of 32 inputs that share a scale, which is what GGUF calls `Q4_0`. The head,
which chooses the tokens and often is the embedding, too, has int8."""

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from inflight.execution.grouped.weight import GroupedLayout, GroupedWeight, Groups
from inflight.execution.weights.formats.int8 import FORMAT as INT8
from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.grouped_linear import GroupedLinear, can_group
from inflight.execution.weights.prepacked_linear import PrepackedLinear

GROUP = 32
"""Inputs that share a scale."""
MIDDLE = 8
"""Numbers run from 0 to 15, and this one stands for 0."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried for a group, as shares of the one that reaches its largest weight; the best one is kept. A
smaller scale cuts that weight off and is finer for all others."""
ROWS_AT_ONCE = 2048
"""Rows of a weight that are rounded at a time, so that a large one never exists as a whole in float32."""
LAYOUT = GroupedLayout(4, GROUP, middle=MIDDLE)


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
        return GroupedLinear

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat`."""
        if isinstance(weight, GroupedWeight):
            return weight
        return GroupedWeight.of(self.name, [round_weight(weight)], weight.dtype, is_stacked=False)

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """See `WeightFormat`."""
        reason = super().why_unusable(model)
        if reason is None and not can_group():
            reason = "needs a C++ compiler"
        return reason


def round_weight(weight: torch.Tensor) -> Groups:
    """A weight `[out, in]` in groups."""
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    numbers = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_groups, dtype=torch.float16)
    for first in range(0, num_outputs, ROWS_AT_ONCE):
        rows = functional.pad(weight[first : first + ROWS_AT_ONCE].float(), (0, num_groups * GROUP - num_inputs))
        some = slice(first, first + len(rows))
        rounded, scales[some] = _round_groups(rows.view(len(rows), num_groups, GROUP))
        numbers[some] = rounded.flatten(1)[:, :num_inputs]
    return Groups(LAYOUT, numbers, scales)


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


FORMAT = _Int4()
