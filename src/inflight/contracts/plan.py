"""`StepPlan`: what one step computes, as plain data. It is all that passes from scheduling to execution.

A plan is complete without the scheduler that made it (it can be recorded, replayed, or sent to another process) and
holds no tensor and no request.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from inflight.contracts.outputs import TokenScore

BlockTable: TypeAlias = "array[int]"
"""The blocks of one sequence in one cache group, in order: token i lies in block `table[i // block_size]`."""
NO_BLOCK = -1
"""In a block table: what these tokens were is not kept, because nobody can see it any more."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `[start, start + length)` of one sequence, computed in one step.

    Attributes:
        sequence_id: never used twice in an engine's life.
        slot: the sequence's lane, below `max_num_seqs`: its row in everything that is kept by slot.
        start: how many tokens of the sequence are computed already; the position of the span's first token.
        token_ids: the span's tokens.
        num_logit_rows: for how many of the span's last tokens logits are wanted: 0 for a chunk that ends before the
            sequence's last token, 1 for most, more for prompt logprobs and speculation.
        sequence_length: how many tokens the sequence has by now, those behind the span included (position embeddings
            of some models depend on it).
        adapter_id: which adapter's weights to add; 0 is none (so far there are none).
        scored_ids: what the sequence has behind the first of those last tokens, if it wants to know how likely the
            model finds that; a token is chosen for the others.
    """

    sequence_id: int
    slot: int
    start: int
    token_ids: Sequence[int]
    num_logit_rows: int
    sequence_length: int
    adapter_id: int = 0
    scored_ids: Sequence[int] = ()

    @property
    def length(self) -> int:
        """Tokens in the span."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the span's last token: how many tokens are computed once the step is done."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which spans to run, and where their keys and values lie.

    Attributes:
        spans: in the order in which they are laid into the row.
        tables: for each cache group, one block table per span. Positions are written through the same table that
            they are read through, so the write indices follow from it.
        copies: (source, destination) blocks to copy in every layer before the forward pass.
        released_slots: slots that were given up since the last plan: state kept by slot may be dropped, before the
            spans are looked at (a slot may already be somebody else's).
    """

    spans: tuple[Span, ...]
    tables: tuple[tuple[BlockTable, ...], ...]
    copies: tuple[tuple[int, int], ...] = ()
    released_slots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the row: the sum of the spans' lengths."""
        return sum(len(span.token_ids) for span in self.spans)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step gave, by row of logits.

    Attributes:
        token_ids: chosen, or the one that is scored; negative where the row's logits are not finite.
        scores: of the rows that want one.
    """

    token_ids: list[int]
    scores: Mapping[int, TokenScore]
