"""A step's spans one by one, for executors that do not run them as one row.

Decides what of them is run now: a model that takes a prompt only in one piece is given it when its last tokens have
come.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from inflight.execution.ragged_batch import IntArray, RaggedBatch


@dataclass(frozen=True, slots=True)
class RunnableSpan:
    """Tokens of one sequence that are to be run.

    Attributes:
        number: of its span in the step.
        slot: its sequence's.
        start: the position of its first token.
        token_ids: `[L]`.
        num_logit_rows: how many rows of logits are wanted, those of its last tokens.
    """

    number: int
    slot: int
    start: int
    token_ids: IntArray
    num_logit_rows: int

    @property
    def length(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.token_ids)


def spans_of(batch: RaggedBatch) -> Iterator[RunnableSpan]:
    """The spans of a step, in order."""
    ends = np.cumsum(batch.query_lens_host)
    for number, (end, length) in enumerate(zip(ends.tolist(), batch.query_lens_host.tolist(), strict=True)):
        yield RunnableSpan(
            number,
            int(batch.slots_host[number]),
            int(batch.kv_lens_host[number]) - length,
            batch.input_ids_host[end - length : end],
            int(batch.num_logit_rows_host[number]),
        )


class TokensBySlot:
    """The tokens that each slot's sequence has been given so far."""

    def __init__(self) -> None:
        self._token_ids: dict[int, IntArray] = {}
        self._lengths: dict[int, int] = {}

    def add(self, span: RunnableSpan) -> None:
        """A sequence has been given these; what was known from their first position on is forgotten."""
        known = self._token_ids.get(span.slot)
        if known is None or len(known) < span.end:
            grown = np.zeros(max(64, 2 * span.end), dtype=np.int64)
            if known is not None:
                grown[: len(known)] = known
            known = self._token_ids[span.slot] = grown
        known[span.start : span.end] = span.token_ids
        self._lengths[span.slot] = span.end

    def whole(self, span: RunnableSpan) -> RunnableSpan:
        """From the sequence's first token on."""
        return RunnableSpan(span.number, span.slot, 0, self._token_ids[span.slot][: span.end], span.num_logit_rows)
