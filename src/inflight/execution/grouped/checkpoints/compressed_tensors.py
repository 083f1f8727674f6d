"""compressed-tensors, the format of llm-compressor: packed integers (W4A16, W8A16), int8 (W8A8), 8-bit floats, and
MXFP4. Activations keep the model's dtype, or are rounded as by our kernels."""

from collections.abc import Mapping, Set
from typing import Any

import torch

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.affine import bytes_of, in_groups, unpacked
from inflight.execution.grouped.checkpoints.floats import powers_of_two, scaled_floats
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod
from inflight.execution.grouped.weight import Groups

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
INT32 = 32
"""Bits."""


class CompressedTensors(QuantizationMethod):
    """See `QuantizationMethod`. `weight_packed` is `[out, in * bits / 32]` int32 (of MXFP4 `[out, in / 2]` uint8), or
    `weight` `[out, in]`; `weight_scale` `[out, groups]`; `weight_zero_point` `[out * bits / 32, groups]` int32, or
    `[out, groups]` int8; and `weight_g_idx` `[in]` has the group of each input."""

    endings = ("_packed", "_scale", "_zero_point", "_shape", "_g_idx", "_global_scale", "")
    kind = "compressed-tensors"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = list((settings.get("config_groups") or {}).values())
        formats = {settings.get("format"), *(each.get("format") for each in groups)} - {None}
        if unknown := sorted(formats - set(FORMATS)):
            raise ModelError(
                f"compressed-tensors in the format {unknown[0]!r} cannot be read; {', '.join(FORMATS)} can"
            )
        weights = [each.get("weights") or {} for each in groups]
        blocks = [each["block_structure"] for each in weights if each.get("block_structure")]
        self._block = tuple(blocks[0]) if blocks else None
        self._groups = [each["group_size"] for each in weights if (each.get("group_size") or 0) > 0]

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return "_scale" in parts and ("_packed" in parts or "" in parts)

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        scales = parts["_scale"]
        if "_global_scale" in parts:
            raise ValueError("it has a global scale (NVFP4)")
        if "_packed" not in parts and parts[""].dtype == torch.float8_e4m3fn:
            return scaled_floats(parts[""], scales, self._block)
        if "_packed" in parts and parts["_packed"].dtype == torch.uint8:
            return powers_of_two(unpacked(parts["_packed"], 4), scales)
        if "_packed" in parts:
            num_outputs, num_inputs = parts["_shape"].tolist()
            packed = parts["_packed"]
            bits = next(each for each in range(1, 9) if -(-num_inputs * each // INT32) == packed.shape[1])
            numbers = unpacked(bytes_of(packed), bits)[:, :num_inputs]
            zeros = self._zeros(parts, bits, num_outputs)
        elif parts[""].dtype == torch.int8:
            bits, numbers = 8, parts[""].view(torch.uint8) ^ 128
            zeros = parts["_zero_point"].int() + 128 if "_zero_point" in parts else 128
        else:
            raise ValueError(f"a weight in {parts[''].dtype} has a scale")
        scales = scales.reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1).expand(len(numbers), -1)
        num_inputs, num_groups = numbers.shape[1], scales.shape[1]
        fitting = (each for each in self._groups if -(-num_inputs // each) == num_groups)
        group = next(fitting, -(-num_inputs // num_groups))
        group_of = parts.get("_g_idx")
        if group_of is not None and int(group_of.min()) < 0:
            group_of = None  # in no other order
        return in_groups(numbers, bits, scales, zeros, group, None if group_of is None else group_of.long())

    def _zeros(self, parts: Mapping[str, torch.Tensor], bits: int, num_outputs: int) -> torch.Tensor | int:
        """The zero points of packed numbers, `[out, groups]`, or one for all."""
        zeros = parts.get("_zero_point")
        if zeros is None:
            return 1 << bits - 1
        if zeros.dtype != torch.int32:
            return zeros.int() + (1 << bits - 1)
        return unpacked(bytes_of(zeros.T), bits)[:, :num_outputs].T
