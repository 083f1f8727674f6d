"""`TokenHistory`: the tokens of each slot's sequence, for executors that rerun sequences."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from inflight.contracts.plan import Span
from inflight.execution.ragged_batch import IntArray


class TokenHistory:
    """The tokens of each slot's sequence so far."""

    def __init__(self) -> None:
        self._token_ids: dict[int, IntArray] = {}

    def add(self, span: Span) -> None:
        """Record a span's tokens, overwriting from its first position on."""
        known = self._token_ids.get(span.slot)
        if known is None or len(known) < span.end:
            grown = np.zeros(max(64, 2 * span.end), dtype=np.int64)
            if known is not None:
                grown[: len(known)] = known
            known = self._token_ids[span.slot] = grown
        known[span.start : span.end] = span.token_ids

    def from_the_beginning(self, span: Span) -> Span:
        """The span, extended to begin with the sequence's first token."""
        return replace(span, start=0, token_ids=self._token_ids[span.slot][: span.end].tolist())

    def release(self, slots: Iterable[int]) -> None:
        """Forget the sequences in these slots."""
        for slot in slots:
            self._token_ids.pop(slot, None)
