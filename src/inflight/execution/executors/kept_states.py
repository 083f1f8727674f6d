"""`KeptStates`: the last hidden state of every token, for a head of the model's own that continues from it.

It lies beside the token's keys and values, in blocks of the same numbers. So it needs no bookkeeping of its own: what
is shared, forked, evicted or computed again there is so here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.ragged_batch import RaggedBatch


class KeptStates:
    """Hidden states of width H by block.

    Args:
        model: whose states they are.
        group: the cache group whose blocks are meant: one that keeps all tokens.
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
        """All states, `[num_blocks, block_size, H]`."""
        return self._states

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (source, destination)."""
        if copies:
            sources, destinations = torch.tensor(copies, device=self._states.device).T
            self._states[destinations] = self._states[sources]

    def write(self, batch: RaggedBatch, states: torch.Tensor) -> None:
        """Keep the states `[T, H]` of a step's tokens."""
        self._places.index_copy_(0, batch.groups[self._group].cache_indices, states)

    def write_at(self, places: torch.Tensor, states: torch.Tensor) -> None:
        """Keep states `[n, H]` at places `[n]` int64 (see `cache_indices`)."""
        self._places.index_copy_(0, places, states)

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """The states `[n, H]` at places `[n]` int64 (see `cache_indices`)."""
        return self._places.index_select(0, places)


@contextmanager
def put_last_states(model: PreTrainedModel, states: list[torch.Tensor]) -> Iterator[None]:
    """Inside, a forward pass over one row puts its last hidden states `[T, H]` there: what the model's decoder returns,
    from which its head computes logits."""

    def observe(module: torch.nn.Module, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output.last_hidden_state)[0])

    hook = model.get_decoder().register_forward_hook(observe)
    try:
        yield
    finally:
        hook.remove()
