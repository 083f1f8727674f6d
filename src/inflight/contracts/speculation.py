"""`Speculator`: proposes draft tokens to the scheduler. Plain data and one protocol.

A draft token costs a row and is verified by sampling that row as usual, so the output never depends on it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from inflight.contracts.params import DEFAULT_PARAMS, SamplingParams
from inflight.contracts.plan import BlockTable


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
    token_ids: Sequence[int]
    num_prompt_tokens: int
    max_draft_tokens: int
    stop_token_ids: AbstractSet[int] = frozenset()
    cache_salt: str | None = None
    predicted_ids: Sequence[int] = ()
    slot: int = 0
    block_tables: Sequence[BlockTable] = ()
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
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each candidate, none or more, at most `budget` in all.

        Args:
            num_tokens: tokens of the step without draft tokens.
            num_sequences: how many sequences the step gives a token without draft tokens.
        """
        ...
