"""`Counting`: computes a model's position ids."""

from dataclasses import dataclass

import numpy as np
import torch

from inflight.execution.ragged_batch import IntArray, RaggedBatch, to_device

TYPE_SHIFT = 20
"""The bits above this one hold a token's type: a graph takes only token ids and positions."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The rule by which positions are counted.

    Attributes:
        padding: the padding token's id, from which positions count, and which is every padding token's position
            (RoBERTa); None: positions count from 0.
    """

    padding: int | None = None

    @property
    def first(self) -> int:
        """The position of a sequence's first token."""
        return 0 if self.padding is None else self.padding + 1

    def positions(self, batch: RaggedBatch) -> torch.Tensor:
        """The positions `[T]` of a step's tokens, with their types. With a `padding`, all spans begin their
        sequences."""
        if self.padding is None:
            return batch.positions
        input_ids = np.concatenate([np.asarray(span.token_ids, dtype=np.int64) for span in batch.spans])
        own = self.after_padding(input_ids, batch.query_lens_host)
        return to_device(own, batch.positions.device) + (batch.positions >> TYPE_SHIFT << TYPE_SHIFT)

    def after_padding(self, input_ids: IntArray, lengths: IntArray) -> IntArray:
        """The positions `[T]` of token ids `[T]` of sequences end to end, of these lengths `[S]`."""
        assert self.padding is not None
        counts = input_ids != self.padding
        so_far = np.cumsum(counts)
        before = np.concatenate([[0], so_far])[np.cumsum(lengths) - lengths]
        positions: IntArray = (so_far - np.repeat(before, lengths)) * counts + self.padding
        return positions


FROM_ZERO = Counting()
