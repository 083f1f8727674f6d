"""Supported types of GGUF's quantized tensors, and their layouts in panels.

A row of a tensor is a row of blocks; a block has 32 or 256 neighbouring inputs (`kernels/gguf_blocks.cpp`).
"""

from collections.abc import Sequence

import torch

from inflight.execution.grouped.checkpoints.four_bit_floats import BIAS, MIDDLE, TWICE
from inflight.execution.grouped.weight import GroupedLayout, PackedMatrix

LAYOUTS = {
    "Q4_0": GroupedLayout(4, 32, middle=8),
    "Q4_1": GroupedLayout(4, 32, has_minima=True),
    "Q5_0": GroupedLayout(5, 32, middle=16),
    "Q5_1": GroupedLayout(5, 32, has_minima=True),
    "Q8_0": GroupedLayout(8, 32, middle=128),
    "Q3_K": GroupedLayout(6, 256, fine=2, middle=4),  # in six bits, because nothing multiplies with three
    "Q4_K": GroupedLayout(4, 256, fine=1, has_minima=True),
    "Q5_K": GroupedLayout(5, 256, fine=1, has_minima=True),
    "Q6_K": GroupedLayout(6, 256, fine=2, middle=32),
    "IQ4_NL": GroupedLayout(4, 32, middle=128, code="nonlinear"),
    "IQ4_XS": GroupedLayout(4, 256, fine=1, middle=128, code="nonlinear"),
    "MXFP4": GroupedLayout(4, 32, middle=MIDDLE, code="e2m1"),
}
HALF_POWERS = (-24, 15)
"""Exponents of the least and the greatest power of two that is a float16."""


def packed_blocks(kind: str, blocks: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[GroupedLayout, PackedMatrix]:
    """A matrix `[out, in]` in panels, with its layout.

    Args:
        kind: of `LAYOUTS`.
        blocks: `[n, in / block, bytes]` uint8 each.
        rows: `[tensors, out]` int64, the index of each row of the matrix in each tensor, from 1, or 0.

    Raises:
        RuntimeError: some scales are not finite.
    """
    layout = LAYOUTS[kind]
    if kind == "MXFP4":
        lowest, highest = (HALF_POWERS[end] + BIAS + TWICE for end in (0, 1))
        exponents = [each[..., 0] for each in blocks]
        if any(bool(((each < lowest) | (each > highest)).any()) for each in exponents):
            layout = GroupedLayout(4, 32, middle=MIDDLE, has_wide_scales=True, code="e2m1")
    return layout, PackedMatrix(torch.ops.inflight.pack_blocks(kind, layout.words, blocks, rows))
