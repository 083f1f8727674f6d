"""What is asked of a way through a model."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from inflight.contracts.cache_layout import CacheGroup
from inflight.execution.ragged_batch import RaggedBatch


class Executor(Protocol):
    """A loaded model together with its cache."""

    name: str
    model: PreTrainedModel

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a sequence can go on from blocks that another one has computed."""
        ...

    @property
    def cache_groups(self) -> Sequence[CacheGroup]:
        """Which tokens it keeps: a plan has a block table in each group for every span."""
        ...

    @property
    def bytes_per_slot(self) -> int:
        """Memory that a slot takes, whatever its sequence's length."""
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes in all layers of a cache group."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make room for so many blocks."""
        ...

    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Copy blocks, run the row, and return the wanted logits `[R, V]`, on the device, in the model's dtype."""
        ...
