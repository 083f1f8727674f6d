"""LongRoPE in a packed row, which holds sequences of many lengths.

LongRoPE (Ding et al., 2024) has one set of frequencies for sequences up to the original training length, and another
for longer ones. `transformers` chooses by the largest position in its input, so in a packed row one long sequence would
change all others. Here each token gets the embedding for its own sequence's length. (A sequence that outgrows that
length is recomputed, as `model.generate` does for Phi-3.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.execution.ragged_batch import RaggedBatch, to_device


def longrope_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence, in tokens, with the short frequencies; None: there is one set only.

    (Dynamic NTK scaling depends on the row, too, but only beyond `max_position_embeddings`, which no sequence reaches.)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # one set for each type of layer
    lengths = [
        int(each["original_max_position_embeddings"])
        for each in nested or [parameters]
        if each.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


@contextmanager
def length_of_its_own(model: PreTrainedModel, batch: RaggedBatch, num_rows: int, limit: int) -> Iterator[None]:
    """A context in which every token of `batch` gets the position embedding for its own sequence's length.

    Args:
        num_rows: tokens of the row that runs, padding included.
        limit: the model's `longrope_length`.
    """
    if not (batch.sequence_lens_host > limit).any():  # no position in the row reaches the limit
        yield
        return
    is_long = np.repeat(batch.sequence_lens_host > limit, batch.query_lens_host)
    is_long = np.pad(is_long, (0, num_rows - len(is_long)))
    long_tokens = to_device(is_long, batch.positions.device)[None, :, None]
    embeddings = [module for module in model.modules() if _is_longrope(module)]
    for module in embeddings:
        module.forward = _forward_by_length(module.forward, long_tokens, limit)
    try:
        yield
    finally:
        for module in embeddings:
            del module.forward  # the instance's attribute, not the class's method


def _is_longrope(module: torch.nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)
    return rope_type == "longrope" or (isinstance(rope_type, dict) and "longrope" in rope_type.values())


def _forward_by_length(forward: Any, long_tokens: torch.Tensor, limit: int) -> Any:
    """A `forward` for a rotary embedding that chooses per token, by `long_tokens` `[1, T, 1]` bool. An extra far
    position in the row, dropped again, forces the long frequencies; clamping positions to the limit forces the short
    ones."""

    def forward_by_length(x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        far = position_ids.new_full((1, 1), limit)
        long = forward(x, torch.cat([position_ids, far], dim=1), **kwargs)
        short = forward(x, position_ids.clamp(max=limit - 1), **kwargs)
        return tuple(torch.where(long_tokens, a[:, :-1], b) for a, b in zip(long, short, strict=True))

    return forward_by_length
