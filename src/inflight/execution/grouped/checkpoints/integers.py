"""AWQ: numbers of four bits, packed along the outputs. After the layout of AutoAWQ's "GEMM".

GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs, which may be permuted, in the layouts of AutoGPTQ and
GPTQModel.

BitNet b1.58: -1, 0 and 1 times one scale, four outputs in a byte, as `transformers` packs them.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.affine import bytes_of, in_groups, unpacked
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod
from inflight.execution.grouped.weight import Groups


class Gptq(QuantizationMethod):
    """See `QuantizationMethod`. `qweight` is `[in * bits / 32, out]` int32, `qzeros` `[groups, out * bits / 32]` int32,
    `scales` `[groups, out]`, and `g_idx` `[in]` has the group of each input."""

    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    parameter = ".weight"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = int(settings.get("bits", 4))
        if self._bits not in (2, 3, 4, 8):
            raise ModelError(f"GPTQ in {self._bits} bits cannot be read; 2, 3, 4 and 8 can")
        layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ModelError(f"GPTQ in the layout {layout!r} cannot be read; 'gptq' and 'gptq_v2' can")
        self._zeros_start_at = 0 if layout == "gptq_v2" else 1
        self._group = int(settings.get("group_size", 128))
        self.kind = f"GPTQ {self._bits} bits"

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return ".qweight" in parts

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        numbers = unpacked(bytes_of(parts[".qweight"].T), self._bits)
        scales = parts[".scales"].T
        zeros = unpacked(bytes_of(parts[".qzeros"]), self._bits).T[: len(numbers)]
        zeros = zeros + self._zeros_start_at & (1 << self._bits) - 1
        group = numbers.shape[1] if self._group == -1 else self._group
        group_of = parts.get(".g_idx")
        return in_groups(numbers, self._bits, scales, zeros, group, None if group_of is None else group_of.long())


PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of eight outputs in its int32."""


class Awq(QuantizationMethod):
    """See `QuantizationMethod`. `qweight` is `[in, out / 8]` int32, `qzeros` `[groups, out / 8]` int32, and `scales`
    `[groups, out]`."""

    endings = (".qweight", ".qzeros", ".scales")
    parameter = ".weight"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = settings.get("bits") or settings.get("w_bit") or 4
        if bits != 4:
            raise ModelError(f"AWQ in {bits} bits cannot be read; 4 can")
        layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if layout != "gemm":
            raise ModelError(f"AWQ in the layout {layout!r} cannot be read; 'gemm' can")
        self._group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
        self.kind = "AWQ 4 bits"

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return ".qweight" in parts

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        numbers, scales = _by_outputs(parts[".qweight"]), parts[".scales"].T
        group = numbers.shape[1] if self._group == -1 else self._group
        return in_groups(numbers, 4, scales, _by_outputs(parts[".qzeros"]), group)


def _by_outputs(packed: torch.Tensor) -> torch.Tensor:
    """`[n, out / 8]` int32 as numbers `[out, n]` uint8."""
    numbers = unpacked(bytes_of(packed), 4).reshape(*packed.shape, len(PLACES))
    return numbers[..., list(PLACES)].flatten(-2).T.contiguous()


class BitNet(QuantizationMethod):
    """See `QuantizationMethod`. A weight is `[out / 4, in]` uint8, whose bits from 2n on have the outputs of the n-th
    quarter, or it is `[out, in]` and not packed; beside it lies its scale `[1]`.

    A layer that rounds activations to int8 per token is trained for that; ours round them per 32 inputs, or not at all
    in exact arithmetic."""

    endings = ("_scale", "")
    kind = "BitNet 1.58 bits"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._divides = settings.get("linear_class", "bitlinear") == "bitlinear"

    def is_quantised(self, parts: Set[str]) -> bool:
        """See `QuantizationMethod`."""
        return parts == {"_scale", ""}

    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """See `QuantizationMethod`."""
        weight, scale = parts[""], parts["_scale"].float()
        if weight.dtype == torch.uint8:
            weight = torch.cat([weight >> 2 * quarter & 3 for quarter in range(4)]).to(torch.int8) - 1
        if not bool(((weight == -1) | (weight == 0) | (weight == 1)).all()):
            raise ValueError("some of its numbers are not -1, 0 or 1")
        numbers = (weight + 1).to(torch.uint8)
        if scale.numel() != 1:
            raise ValueError(f"it has {scale.numel()} scales, not one")
        scales = (1 / scale if self._divides else scale).expand(len(numbers), 1)
        return in_groups(numbers, 2, scales.contiguous(), 1, numbers.shape[1])
