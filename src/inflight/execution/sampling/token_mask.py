"""Masks of the tokens allowed in a row of logits.

Knows bits and logits, not their source (`inflight.grammar`).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class TokenMasks(NamedTuple):
    """Masks for some rows of a step's logits: the rows, ascending, and int32 words `[len(rows), ceil(V / 32)]`."""

    rows: Sequence[int]
    words: npt.NDArray[np.int32]


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place; NaN stays NaN.

    Looks up each byte of the mask as eight upper limits, without branches: a seventh of `masked_fill_`'s time.

    Args:
        logits: `[R, V]`, floating point.
        mask: int32 `[R, ceil(V / 32)]`, on the same device; a set bit is an allowed token, the lowest bit first.
    """
    bytes_ = mask.view(torch.uint8).int()  # the lowest byte first, as on every machine that torch runs on
    limits = torch.nn.functional.embedding(bytes_, _limits_of_byte(logits.dtype, logits.device)).flatten(1)
    torch.minimum(logits, limits[:, : logits.shape[-1]], out=logits)


@cache
def _limits_of_byte(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[256, 8]`: for each byte and each of its bits, infinity if the bit is set, else -infinity."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), torch.inf, -torch.inf).to(dtype=dtype, device=device)
