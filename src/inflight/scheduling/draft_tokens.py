"""`DraftPlanner`: adds draft tokens to a step, which verifies them.

Draft tokens follow decodes, within the budget and free blocks left once everything else is planned: no sequence waits
or is preempted for them. A `Speculator` decides which sequences get how many.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from inflight.contracts.api.params import DEFAULT_PARAMS, SamplingParams
from inflight.contracts.step.plan import BlockTable, Span
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.sequence import Sequence


class Candidate(NamedTuple):
    """A sequence with one uncomputed token, which draft tokens may follow.

    Attributes:
        token_ids: prompt and output so far; it belongs to the sequence and must not be changed.
        num_prompt_tokens: how many of them are the prompt.
        max_draft_tokens: the most draft tokens; at least one.
        stop_token_ids: tokens that end the sequence; nothing after them needs drafting.
        cache_salt: only sequences with the same salt may learn from each other.
        predicted_ids: the caller's prediction of parts of its output.
        slot, block_tables: where it is, as in `StepPlan`; tables have room for its last token.
        params, seed, sequence_index: how its tokens are chosen, as in `SlotAssignment`.
    """

    sequence_id: int
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    max_draft_tokens: int
    stop_token_ids: AbstractSet[int] = frozenset()
    cache_salt: str | None = None
    predicted_ids: SequenceOf[int] = ()
    slot: int = 0
    block_tables: SequenceOf[BlockTable] = ()
    params: SamplingParams = DEFAULT_PARAMS
    seed: int = 0
    sequence_index: int = 0


class Speculator(Protocol):
    """Proposes draft tokens, and decides how many are worth their rows.

    Attributes:
        max_draft_tokens: of a sequence in one step.
        is_ready: whether it would propose anything now.
    """

    max_draft_tokens: int

    @property
    def is_ready(self) -> bool: ...

    def propose(
        self, candidates: SequenceOf[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> SequenceOf[SequenceOf[int]]:
        """Return the draft tokens of each candidate, none or more, at most `budget` in all.

        Args:
            num_tokens: tokens of the step without draft tokens.
            num_sequences: how many sequences the step gives a token without draft tokens.
        """
        ...


class DraftPlanner:
    """Adds draft tokens to the steps of one scheduler.

    Args:
        recompute_beyond: no draft token takes a sequence past this length, beyond which it is recomputed; None: no
            limit.
    """

    def __init__(self, speculator: Speculator, block_pool: BlockPool, recompute_beyond: int | None) -> None:
        self._speculator = speculator
        self._block_pool = block_pool
        self._recompute_beyond = recompute_beyond

    def propose(self, lengths: Mapping[Sequence, int], budget: int) -> dict[Sequence, SequenceOf[int]]:
        """Return the draft tokens of a step's sequences, and grow their tables for them.

        Args:
            lengths: the tokens that each sequence computes without draft tokens.
            budget: the most draft tokens of the step.
        """
        if budget <= 0 or not self._speculator.is_ready:
            return {}
        most = min(budget, self._speculator.max_draft_tokens)
        sequences = [each for each, length in lengths.items() if length == 1 and self._room(each) > 0]
        if not sequences:
            return {}
        candidates = [_candidate(each, min(self._room(each), most)) for each in sequences]
        num_rows = sum(length == sequence.num_uncomputed_tokens for sequence, length in lengths.items())
        drafts = self._speculator.propose(candidates, sum(lengths.values()), num_rows, budget)
        proposed = {}
        for sequence, candidate, token_ids in zip(sequences, candidates, drafts, strict=True):
            num_allowed = min(candidate.max_draft_tokens, budget, len(token_ids))
            num_allowed = self._grow(sequence, num_allowed)
            if num_allowed > 0:
                proposed[sequence] = token_ids[:num_allowed]
                budget -= num_allowed
        return proposed

    def _room(self, sequence: Sequence) -> int:
        """The most draft tokens of a sequence: the token after the last one is never computed."""
        longest = sequence.request.max_num_tokens - 1
        if sequence.num_uncomputed_tokens != 1 or not sequence.request.params.speculation:
            return 0
        if self._recompute_beyond is not None and len(sequence.token_ids) <= self._recompute_beyond:
            longest = min(longest, self._recompute_beyond)
        return longest - len(sequence.token_ids)

    def _grow(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """Grow a sequence's tables for draft tokens; return how many fit."""
        tables, num_tokens = sequence.block_tables, len(sequence.token_ids)
        if self._block_pool.grow(tables, num_tokens + num_draft_tokens):
            return num_draft_tokens
        return sequence.num_blocks * self._block_pool.block_size - num_tokens


def num_accepted_tokens(span: Span, new_token_ids: SequenceOf[int]) -> int:
    """Count a span's accepted draft tokens. The last new token is not computed, whether or not it was drafted."""
    num_right = 0
    for proposed, new in zip(span.draft_token_ids, new_token_ids[:-1], strict=False):
        if proposed != new:
            break
        num_right += 1
    return num_right


def _candidate(sequence: Sequence, room: int) -> Candidate:
    request, slot = sequence.request, sequence.slot
    assert slot is not None
    return Candidate(
        sequence.sequence_id,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        room,
        request.stop_token_ids,
        request.cache_salt,
        request.predicted_ids,
        slot,
        sequence.block_tables,
        request.params,
        request.seed,
        sequence.index,
    )
