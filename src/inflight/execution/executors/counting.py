"""`Counting`: how a model counts the positions of its tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

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

    def after_padding(self, places: IntArray, paddings: IntArray) -> IntArray:
        """The positions `[n]` of the tokens at `places` `[n]` of a sequence that has padding tokens at `paddings`, in
        order; all int64."""
        assert self.padding is not None
        number = np.searchsorted(paddings, places)
        positions: IntArray = places - number + self.padding + 1
        positions[np.isin(places, paddings)] = self.padding
        return positions


FROM_ZERO = Counting()


def skips_padding(model: PreTrainedModel) -> bool:
    """Whether a model may count positions by its padding token."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


class Positions:
    """Computes the positions of each step.

    Args:
        counting: the model's.
    """

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._paddings: dict[int, IntArray] = {}  # where each slot's sequence has padding tokens

    def of(self, batch: RaggedBatch) -> torch.Tensor:
        """The positions `[T]` int64 of a step's tokens, with their types."""
        padding = self._counting.padding
        if padding is None:
            return batch.positions
        for each in batch.plan.assignments:
            self._paddings[each.slot] = np.flatnonzero(np.asarray(each.token_ids) == padding)
        found = []
        for span in batch.spans:
            paddings = self._paddings.get(span.slot, np.empty(0, dtype=np.int64))
            own = span.start + np.flatnonzero(np.asarray(span.token_ids) == padding)
            paddings = self._paddings[span.slot] = np.concatenate([paddings[paddings < span.start], own])
            found.append(self._counting.after_padding(np.arange(span.start, span.end), paddings))
        own = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        return to_device(own, batch.positions.device) + (batch.positions >> TYPE_SHIFT << TYPE_SHIFT)
