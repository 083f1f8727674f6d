"""Which tokens a row of logits may choose from, as bits: everything else becomes impossible.

Knows bits and logits; where the bits come from (`inflight.grammar`) is not its business.
"""

import numpy as np
import torch


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: `[R, V]`.
        mask: int32 `[R, ceil(V / 32)]`, on the same device: a set bit is an allowed token, the lowest bit first.
    """
    logits.masked_fill_(_is_forbidden(mask, logits.shape[-1]), -torch.inf)


def _is_forbidden(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The bits that are not set, as bools `[R, V]`."""
    if mask.device.type == "cpu":  # numpy unpacks ten times as fast as torch shifts
        forbidden = np.unpackbits((~mask).numpy().view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(forbidden.view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :vocab_size]
