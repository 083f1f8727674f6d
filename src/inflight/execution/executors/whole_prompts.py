"""`TokensBySlot`: what an executor needs that runs prompts whole, or sequences again from their beginning."""

from dataclasses import replace

import numpy as np

from inflight.contracts.plan import Span
from inflight.execution.ragged_batch import IntArray


class TokensBySlot:
    """The tokens that each slot's sequence has been given so far."""

    def __init__(self) -> None:
        self._token_ids: dict[int, IntArray] = {}

    def add(self, span: Span) -> None:
        """A sequence has been given these; what was known from their first position on is forgotten."""
        known = self._token_ids.get(span.slot)
        if known is None or len(known) < span.end:
            grown = np.zeros(max(64, 2 * span.end), dtype=np.int64)
            if known is not None:
                grown[: len(known)] = known
            known = self._token_ids[span.slot] = grown
        known[span.start : span.end] = span.token_ids

    def whole(self, span: Span) -> Span:
        """From the sequence's first token on."""
        return replace(span, start=0, token_ids=self._token_ids[span.slot][: span.end].tolist())
