"""`StepPlan`: all that scheduling passes to execution for one step, as plain data; `StepTokens`: the result.

A plan is self-contained: recorded plans, or plans sent to another process, give the same tokens there if that runner
gets all of them from the first. Only token masks of structured output are not included: a grammar computes them while
the model runs.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from inflight.contracts.api.outputs import TokenScore
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.pooling import PooledText, Values
from inflight.contracts.step.multimodal import MultimodalInputs

BlockTable: TypeAlias = "array[int]"
"""The blocks of one sequence in one cache group, in order: token i lies in block `table[i // block_size]`."""
NO_BLOCK = -1
"""In a block table: these tokens' keys and values are dropped, because no later query can see them."""
NO_STATE = -1
"""In place of a recurrent state: a sequence's beginning, where it is read; nothing is kept, where it is written."""

BadWords: TypeAlias = Mapping[tuple[int, ...], Sequence[int]]
"""Texts that are never generated, by all but their last token: the tokens that never follow those."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A sequence takes a slot: everything that sampling its tokens depends on.

    Attributes:
        index: index among its request's `n` sequences; part of its random stream.
        token_ids: the sequence so far, prompt first.
        prompt_len: how many of them are the prompt.
        seed: of its request's random stream.
        stop_token_ids: EOS ids included; not chosen before `params.min_tokens` output tokens.
        bad_words: texts that its output never contains.
        adapter: the digest of its adapter; None: none.
        text: the pooling of its text; None: tokens are sampled.
        multimodal: the images and sounds of its prompt; None: it has none.
    """

    slot: int
    sequence_id: int
    index: int
    token_ids: Sequence[int]
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: BadWords = field(default_factory=dict)
    adapter: str | None = None
    text: PooledText | None = None
    multimodal: MultimodalInputs | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `[start, start + length)` of one sequence, computed in one step.

    Attributes:
        sequence_id: unique within an engine's life.
        slot: below `max_num_seqs`: its row in all state kept by slot.
        start: position of the span's first token: the number of tokens computed before.
        token_ids: the span's tokens.
        num_logit_rows: how many of the span's last tokens need logits: 0 for a chunk that ends before the sequence's
            last token, 1 for most spans, more for prompt logprobs and after draft tokens; all of a text that is pooled
            whole.
        sequence_length: how many tokens the sequence has by now, including those after the span (some models'
            position embeddings depend on it), and draft tokens.
        scored_ids: the tokens that follow the first of these last tokens, if the request asks for their
            log-probabilities (`prompt_logprobs`). For the remaining rows a token is chosen.
        num_draft_tokens: how many of its last tokens are draft tokens. One is accepted if sampling the row before it
            gives the same token.
        state: the recurrent state that it continues from.
        states: where it leaves its states: (number of its first tokens, state), ascending. Empty: its states are those
            of its slot.
    """

    sequence_id: int
    slot: int
    start: int
    token_ids: Sequence[int]
    num_logit_rows: int
    sequence_length: int
    scored_ids: Sequence[int] = ()
    num_draft_tokens: int = 0
    state: int = NO_STATE
    states: tuple[tuple[int, int], ...] = ()

    @property
    def draft_token_ids(self) -> Sequence[int]:
        """Its draft tokens."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]

    @property
    def length(self) -> int:
        """Tokens in the span."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the span's last token: the number of computed tokens after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the spans to run, their block tables, and changes of slots since the last plan.

    A runner takes a plan in this order: released slots, assignments, copies, spans. A plan without spans only releases.

    Attributes:
        spans: in the order in which they are laid into the row.
        tables: for each cache group, one block table per span. Positions are written through the same table that
            they are read through, so the write indices follow from it.
        copies: (source, destination) blocks to copy in every layer before the forward pass.
        released_slots: slots freed since the last plan, by sequences that ended or were preempted. The runner drops any
            state of them; it may have none, since a sequence can end before a plan assigns its slot.
        assignments: sequences that took a slot since the last plan; each has a span in this plan.
    """

    spans: tuple[Span, ...]
    tables: tuple[tuple[BlockTable, ...], ...]
    copies: tuple[tuple[int, int], ...] = ()
    released_slots: tuple[int, ...] = ()
    assignments: tuple[SlotAssignment, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the row: the sum of the spans' lengths."""
        return sum(len(span.token_ids) for span in self.spans)


class SpanTokens(NamedTuple):
    """A step's result for one span.

    Attributes:
        token_ids: sampled tokens: none for a chunk; with draft tokens, the accepted ones and the next one; up to the
            first row without a valid choice.
        is_finite: whether the span's logits allowed a choice: no NaN, and a finite largest logit.
        scores: of the chosen tokens, if the request asks for `logprobs`.
        prompt_scores: of the span's `scored_ids`.
        values: the numbers of a text that is pooled, once its last token has run.
        error: why the logits are not finite; None: not known.
    """

    token_ids: list[int]
    is_finite: bool = True
    scores: Sequence[TokenScore] = ()
    prompt_scores: Sequence[TokenScore] = ()
    values: "Values | None" = None
    error: str | None = None


StepTokens: TypeAlias = list[SpanTokens]
"""A step's results, one for each span of its plan, in order."""
