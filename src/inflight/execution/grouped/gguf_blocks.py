"""The types of GGUF's quantised tensors, taken apart into numbers and scales without loss. After the definitions of
ggml (`ggml-common.h`, `ggml-quants.c`).

A row of a tensor is a row of blocks; a block has 32 or 256 neighbouring inputs.
"""

from collections.abc import Callable

import torch

from inflight.execution.grouped.checkpoints.four_bit_floats import powers_of_two
from inflight.execution.grouped.weight import GroupedLayout, Groups

LOW, HIGH = 15, 4
"""Half a byte: what is left of the lower one, and how far away the higher one is."""


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a place of every block: `[rows, blocks]`."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _both_halves(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[rows, n, bytes]` as numbers `[rows, n, 2 * bytes]`: first all lower halves, then all higher ones."""
    return torch.cat([packed & LOW, packed >> HIGH], dim=-1)


def _parted(packed: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension as several ones."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _rows(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(len(numbers), -1)


def _q4_0(blocks: torch.Tensor) -> Groups:
    return Groups(GroupedLayout(4, 32, middle=8), _rows(_both_halves(blocks[..., 2:])), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Groups:
    numbers, minima = _both_halves(blocks[..., 4:]), -_halves(blocks, 2)
    return Groups(GroupedLayout(4, 32, has_minima=True), _rows(numbers), _halves(blocks, 0), coarse_minima=minima)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Four bytes `[rows, n, 4]` as the fifth bits `[rows, n, 32]` of numbers."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Groups:
    numbers = _both_halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Groups(GroupedLayout(5, 32, middle=16), _rows(numbers), _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Groups:
    numbers = _both_halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    minima = -_halves(blocks, 2)
    return Groups(GroupedLayout(5, 32, has_minima=True), _rows(numbers), _halves(blocks, 0), coarse_minima=minima)


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(GroupedLayout(8, 32, middle=128), _rows(blocks[..., 2:] ^ 128), _halves(blocks, 0))


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes `[rows, n, 12]` as eight scales and eight minima of six bits, `[rows, n * 8]` int8 each."""
    first, second, third = (packed[..., start : start + 4] for start in (0, 4, 8))
    scales = torch.cat([first & 63, third & LOW | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> HIGH | second >> 6 << 4], dim=-1)
    return _rows(scales).view(torch.int8), _rows(minima).view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> Groups:
    fine, fine_minima = _scales_and_minima(blocks[..., 4:16])
    numbers = _both_halves(_parted(blocks[..., 16:], 4, 32))
    layout = GroupedLayout(4, 256, fine=1, has_minima=True)
    return Groups(layout, _rows(numbers), _halves(blocks, 0), fine, _halves(blocks, 2), fine_minima)


def _q5_k(blocks: torch.Tensor) -> Groups:
    fine, fine_minima = _scales_and_minima(blocks[..., 4:16])
    low = _both_halves(_parted(blocks[..., 48:], 4, 32))
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    layout = GroupedLayout(5, 256, fine=1, has_minima=True)
    return Groups(layout, _rows(low) | _rows(high) << 4, _halves(blocks, 0), fine, _halves(blocks, 2), fine_minima)


def _q6_k(blocks: torch.Tensor) -> Groups:
    low = _both_halves(_parted(blocks[..., :128], 2, 64))
    high = _parted(blocks[..., 128:192], 2, 1, 32) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    fine = _rows(blocks[..., 192:208]).view(torch.int8)
    return Groups(GroupedLayout(6, 256, fine=2, middle=32), _rows(low) | _rows(high) << 4, _halves(blocks, 208), fine)


def _q3_k(blocks: torch.Tensor) -> Groups:
    """In six bits, because nothing multiplies with three."""
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    low = _parted(blocks[..., 32:96], 2, 1, 32) >> shifts & 3
    high = blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    first, second = blocks[..., 96:104], blocks[..., 104:108]
    high_scales = torch.cat([second >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    fine = (_rows(_both_halves(first) | high_scales << 4).to(torch.int8)) - 32
    layout = GroupedLayout(6, 256, fine=2, middle=4)
    return Groups(layout, _rows(low) | _rows(high) << 2, _halves(blocks, 108), fine)


def _iq4_nl(blocks: torch.Tensor) -> Groups:
    layout = GroupedLayout(4, 32, middle=128, code="nonlinear")
    return Groups(layout, _rows(_both_halves(blocks[..., 2:])), _halves(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> Groups:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    low = torch.stack([blocks[..., 4:8] & LOW, blocks[..., 4:8] >> HIGH], dim=-1).flatten(-2)
    high = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    fine = _rows(low | high << 4).to(torch.int8) - 32
    numbers = _both_halves(_parted(blocks[..., 8:], 8, 16))
    layout = GroupedLayout(4, 256, fine=1, middle=128, code="nonlinear")
    return Groups(layout, _rows(numbers), _halves(blocks, 0), fine)


def _mxfp4(blocks: torch.Tensor) -> Groups:
    return powers_of_two(_both_halves(blocks[..., 1:]).flatten(-2), blocks[..., 0])


BLOCK_TYPES: dict[str, Callable[[torch.Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Takes blocks `[out, in / block, bytes]` uint8 apart, for the types that can be kept as they are."""
