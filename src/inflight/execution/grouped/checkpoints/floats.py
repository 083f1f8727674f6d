"""MXFP4: 4-bit floats (e2m1) in groups of 32 inputs with a power-of-two scale, by the Open Compute Project's
specification, as in gpt-oss.

FP8 (`float8_e4m3fn`) with a scale per weight, per output, or per block: DeepSeek's and Qwen's, FBGEMM's, and
compressed-tensors'. Activations keep the model's dtype.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch

from inflight.execution.grouped.affine import narrowest, unpacked
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod
from inflight.execution.grouped.weight import CHUNK, GroupedLayout, Groups

NOT_A_NUMBER = 127
"""The code of NaN, without its sign."""


class EightBitFloats(QuantizationMethod):
    """See `QuantizationMethod`. A weight lies beside its scale, which is called so, or `_scale_inv`."""

    endings = ("_scale_inv", "_scale", "")
    kind = "FP8"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._block = settings.get("weight_block_size")

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return "" in parts and len(parts) > 1

    def is_stacked(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """See `QuantizationMethod`."""
        return parts[""].dim() == 3

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        scales = parts["_scale_inv"] if "_scale_inv" in parts else parts["_scale"]
        return scaled_floats(parts[""], scales, self._block)


def scaled_floats(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> Groups | torch.Tensor:
    """A weight `[out, in]` float8_e4m3fn times its scales: one, `[out, 1]`, or `[out / block, in / block]`. Raises
    `ValueError` if it is not that."""
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"a weight in {weight.dtype} has a scale")
    num_outputs, num_inputs = weight.shape
    scales = scales.float()
    if scales.numel() == 1:
        scales, group = scales.reshape(1, 1).expand(num_outputs, 1), num_inputs
    elif scales.numel() == num_outputs and scales.shape[0] == num_outputs:
        scales, group = scales.reshape(num_outputs, 1), num_inputs
    elif block is not None and scales.shape == (-(-num_outputs // block[0]), -(-num_inputs // block[1])):
        scales, group = scales.repeat_interleave(block[0], dim=0)[:num_outputs], block[1]
    else:
        raise ValueError(f"scales {list(scales.shape)} do not fit a weight {list(weight.shape)}")
    numbers = weight.view(torch.uint8)
    if bool((numbers & NOT_A_NUMBER == NOT_A_NUMBER).any()):
        raise ValueError("some of its elements are not numbers")
    if scales.shape[1] == 1:
        group = -(-num_inputs // CHUNK) * CHUNK
    if group % CHUNK:
        return weight.float() * scales.repeat_interleave(group, dim=1)[:, :num_inputs]
    return Groups(GroupedLayout(8, group, has_wide_scales=True, code="e4m3"), numbers, scales.contiguous())


BIAS, TWICE = 127, 1
"""Of the exponents, and what is taken from them because numbers stand for twice their value."""
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
