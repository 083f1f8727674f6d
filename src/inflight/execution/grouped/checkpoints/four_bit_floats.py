"""MXFP4: 4-bit floats (e2m1) in groups of 32 inputs with a power-of-two scale, by the Open Compute Project's
specification, as in gpt-oss."""

from collections.abc import Mapping, Set
from typing import Any

import torch

from inflight.execution.grouped.affine import narrowest, unpacked
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod
from inflight.execution.grouped.weight import CHUNK, GroupedLayout, Groups

BIAS, TWICE = 127, 1
"""The bias of exponents, and its correction, because the stored numbers are twice their values."""
MIDDLE = 12
NOT_A_NUMBER = 255


class FourBitFloats(QuantizationMethod):
    """See `QuantizationMethod`. `blocks` are `[out, in / 32, 16]` uint8, and `scales` `[out, in / 32]` uint8. The
    parameter has the inputs first."""

    endings = ("_blocks", "_scales")
    kind = "MXFP4"
    has_inputs_first = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        pass

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return "_blocks" in parts

    def is_stacked(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """See `QuantizationMethod`."""
        return parts["_blocks"].dim() == 4

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        return powers_of_two(unpacked(parts["_blocks"].flatten(-2), 4), parts["_scales"])


def powers_of_two(numbers: torch.Tensor, exponents: torch.Tensor) -> Groups:
    """A weight from its numbers `[out, in]` uint8, and the exponents `[out, in / 32]` uint8 of its groups. Raises
    `ValueError` if one stands for NaN."""
    if bool((exponents == NOT_A_NUMBER).any()):
        raise ValueError("some of its scales are not numbers")
    scales = narrowest(torch.ldexp(torch.ones(exponents.shape), exponents.int() - (BIAS + TWICE)))
    layout = GroupedLayout(4, CHUNK, middle=MIDDLE, has_wide_scales=scales.dtype == torch.float32, code="e2m1")
    return Groups(layout, numbers, scales)
