"""GGUF's types of one to three bits whose blocks name points of a lattice (IQ1, IQ2, IQ3), as numbers of four bits.

Their weights have at most sixteen magnitudes and signs, times a scale of sixteen or 32 inputs; the tables of points are
those of the `gguf` package, which dequantizes a block.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from inflight.execution.grouped.affine import narrowest, unpacked
from inflight.execution.grouped.weight import CHUNK, TABLES, GroupedLayout, Groups

INPUTS = 256
"""Of a block."""
WEIGHTS_AT_ONCE = 2**18
"""Of a thread."""


@dataclass(frozen=True)
class Lattice:
    """How a type's numbers are scaled.

    Attributes:
        code: of `CODES`: its values.
        middle: of these.
        fine: scales of `CHUNK` inputs.
        unit: a coarse scale is this fraction of the block's stored one.
    """

    code: str
    middle: int
    fine: int
    unit: float


LATTICES = {
    "IQ1_S": Lattice("lattice2", 64, 1, 1 / 8),
    "IQ1_M": Lattice("lattice2", 64, 2, 1 / 8),
    "IQ2_XXS": Lattice("lattice2", 64, 1, 1 / 8),
    "IQ2_XS": Lattice("lattice2", 64, 2, 1 / 8),
    "IQ2_S": Lattice("lattice2", 64, 2, 1 / 8),
    "IQ3_XXS": Lattice("lattice3", 64, 1, 1 / 4),
    "IQ3_S": Lattice("odd", 16, 1, 1),
}


def lattice_groups(kind: str, blocks: torch.Tensor) -> Groups:
    """A weight `[out, in]`.

    Args:
        kind: of `LATTICES`.
        blocks: `[out, in / 256, bytes]` uint8.

    Raises:
        RuntimeError: some scales are not finite.
    """
    import gguf

    lattice, given = LATTICES[kind], blocks.contiguous()
    if kind == "IQ1_M":  # whose scale lies in the highest bits of four words
        words = given[..., -8:].view(torch.int16).int() & 0xFFFF
        bits = (words >> 12 << torch.arange(0, 16, 4)).sum(-1, dtype=torch.int32)
        coarse = bits.to(torch.int16).view(torch.float16)
    else:
        coarse = given[..., :2].contiguous().view(torch.float16)[..., 0]
    if not bool(coarse.isfinite().all()):
        raise RuntimeError("some scales are not finite")
    scales = narrowest(coarse.float() * lattice.unit)
    fine = (2 * _steps(kind, given) + 1).to(torch.int8).flatten(1)
    table = torch.tensor(TABLES[lattice.code]) - lattice.middle
    number_of = torch.zeros(2 * lattice.middle, dtype=torch.uint8)
    number_of[table + lattice.middle] = torch.arange(len(table), dtype=torch.uint8)

    def numbers_of(rows: torch.Tensor) -> torch.Tensor:
        values = gguf.dequantize(given[rows].flatten(1).numpy(), gguf.GGMLQuantizationType[kind])
        steps = scales[rows].float().repeat_interleave(INPUTS // CHUNK * lattice.fine, dim=1) * fine[rows]
        steps = torch.where(steps == 0, 1, steps).repeat_interleave(CHUNK // lattice.fine, dim=1)
        return number_of[(torch.from_numpy(values) / steps).round().int() + lattice.middle]

    parts = torch.split(torch.arange(len(given)), max(1, WEIGHTS_AT_ONCE // (INPUTS * given.shape[1])))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        numbers = torch.cat(list(pool.map(numbers_of, parts)))
    has_wide_scales = scales.dtype == torch.float32
    layout = GroupedLayout(4, INPUTS, lattice.fine, False, lattice.middle, has_wide_scales, lattice.code)
    return Groups(layout, numbers, scales, fine)


def _steps(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """The stored fine scales of blocks `[out, n, bytes]`: `[out, n, 8 or 16]` integers."""
    if kind in ("IQ2_XS", "IQ2_S"):
        return unpacked(blocks[..., -8:], 4)
    if kind == "IQ3_S":
        return unpacked(blocks[..., -4:], 4)
    if kind == "IQ2_XXS":  # in the highest bits of every other word of four bytes,
        return blocks[..., 9::8] >> 4
    if kind == "IQ3_XXS":  # of each of the last eight,
        return blocks[..., 69::4] >> 4
    if kind == "IQ1_S":  # of words of two bytes
        return blocks[..., 35::2] >> 4 & 7
    words = blocks[..., -8:].contiguous().view(torch.int16).int() & 0xFFFF
    return (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2)
