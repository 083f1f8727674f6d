"""`Speculator`: what the scheduler asks for tokens that may come next. Plain data and one protocol.

A guess costs a row and is checked by sampling that row as ever, so nothing but time depends on it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from inflight.contracts.params import DEFAULT_PARAMS, SamplingParams
from inflight.contracts.plan import BlockTable


class Candidate(NamedTuple):
    """A sequence that owes one token, after which more may be guessed.

    Attributes:
        token_ids: prompt and output so far; it belongs to the sequence and must not be changed.
        num_prompt_tokens: how many of them are the prompt.
        max_guessed_tokens: how many tokens may be guessed at most; at least one.
        stop_token_ids: tokens that end the sequence: nothing follows them, so they need not be guessed.
        cache_salt: what one sequence knows may serve another only if both have the same.
        predicted_ids: what its output may be like in parts, as its caller says.
        slot, block_tables: where it is, as in `StepPlan`; tables have room for its last token.
        params, seed, sequence_index: how its tokens are chosen, as in `SlotAssignment`.
    """

    sequence_id: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    max_guessed_tokens: int
    stop_token_ids: AbstractSet[int] = frozenset()
    cache_salt: str | None = None
    predicted_ids: Sequence[int] = ()
    slot: int = 0
    block_tables: Sequence[BlockTable] = ()
    params: SamplingParams = DEFAULT_PARAMS
    seed: int = 0
    sequence_index: int = 0


class Speculator(Protocol):
    """Guesses tokens, and decides how many are worth their rows.

    Attributes:
        max_guessed_tokens: of a sequence in one step.
        is_ready: whether it would guess anything now.
    """

    max_guessed_tokens: int

    @property
    def is_ready(self) -> bool: ...

    def guess(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> Sequence[Sequence[int]]:
        """Return the guessed tokens of each candidate, none or more, at most `budget` in all.

        Args:
            num_tokens: tokens of the step without guesses.
            num_sequences: how many sequences the step gives a token without guesses.
        """
        ...
