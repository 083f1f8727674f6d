"""The interface of executors, which run a model on a step's spans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from inflight.contracts.step.cache_layout import CacheGroup
from inflight.execution.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class Capabilities:
    """An executor's capabilities.

    Attributes:
        shares_prefixes: a sequence can continue from another's blocks.
        chunks_prompts: a prompt is computed chunk by chunk. If not, the executor holds its chunks back until the last
            one.
    """

    shares_prefixes: bool
    chunks_prompts: bool


class Executor(Protocol):
    """A loaded model with its cache."""

    name: str
    model: PreTrainedModel

    @property
    def capabilities(self) -> Capabilities:
        """Its features for this model."""
        ...

    @property
    def cache_groups(self) -> Sequence[CacheGroup]:
        """The cache groups: a plan has a block table in each group for every span."""
        ...

    @property
    def bytes_per_slot(self) -> int:
        """Memory that a slot takes, whatever its sequence's length."""
        ...

    @property
    def bytes_per_state(self) -> int:
        """Memory of one of the recurrent states that plans name; 0: they name none."""
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes in all layers of a cache group."""
        ...

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """Allocate blocks, and recurrent states."""
        ...

    def release(self, slots: Iterable[int]) -> None:
        """Drop the state of the sequences that had these slots."""
        ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Copy the plan's blocks, run its spans, and return the logits `[R, V]`, on the device, in the model's
        dtype."""
        ...
