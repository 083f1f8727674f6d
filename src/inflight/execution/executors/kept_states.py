"""`KeptStates`: the last hidden state of every token, for the model's MTP head.

States use the block numbers of the token's keys and values, so they need no block tables of their own: blocks shared,
forked, evicted or recomputed there are so here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.ragged_batch import RaggedBatch


class KeptStates:
    """Hidden states by block, in the model's dtype.

    Args:
        model: the model.
        group: the cache group whose block numbers are used; it keeps all tokens.
    """

    def __init__(self, model: PreTrainedModel, group: int, num_blocks: int, block_size: int) -> None:
        self._group = group
        shape = num_blocks, block_size, int(model.config.get_text_config().hidden_size)
        if model.device.type == "cpu":
            memory = untouched_memory(shape[0] * shape[1] * shape[2] * model.dtype.itemsize)
            self._states = memory.view(model.dtype).view(shape)
        else:
            self._states = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._places = self._states.view(-1, shape[2])

    @property
    def memory(self) -> torch.Tensor:
        """All states, `[num_blocks, block_size, hidden]` in the model's dtype."""
        return self._states

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (source, destination)."""
        if copies:
            sources, destinations = torch.tensor(copies, device=self._states.device).T
            self._states[destinations] = self._states[sources]

    def write(self, batch: RaggedBatch, states: torch.Tensor) -> None:
        """Keep the states of a step's tokens, `[T, hidden]` in the model's dtype."""
        self._places.index_copy_(0, batch.groups[self._group].cache_indices, states)

    def write_at(self, places: torch.Tensor, states: torch.Tensor) -> None:
        """Keep states `[n, hidden]` at places `[n]` int64 (see `cache_indices`)."""
        self._places.index_copy_(0, places, states)

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """The states `[n, hidden]` at places `[n]` int64 (see `cache_indices`)."""
        return self._places.index_select(0, places)


@contextmanager
def put_last_states(model: PreTrainedModel, states: list[torch.Tensor]) -> Iterator[None]:
    """A context in which a forward pass over one row appends its last hidden states to `states`, `[T, hidden]` in the
    model's dtype: the decoder's output, from which the head computes logits."""

    def observe(module: torch.nn.Module, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output.last_hidden_state)[0])

    hook = model.get_decoder().register_forward_hook(observe)
    try:
        yield
    finally:
        hook.remove()
