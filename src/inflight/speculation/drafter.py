"""`Drafter`: one source of draft tokens, with their chances."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inflight.scheduling.draft_tokens import Candidate


class DraftTokens(NamedTuple):
    """Proposed tokens.

    Attributes:
        chances: of each token, the probability from 0 to 1 that it is accepted if all before it are.
    """

    token_ids: Sequence[int]
    chances: Sequence[float]


NO_DRAFT = DraftTokens((), ())


class Drafter(Protocol):
    """Drafts for one sequence at a time."""

    def propose(self, candidate: Candidate) -> DraftTokens:
        """Return at most `candidate.max_draft_tokens` tokens that may follow `candidate.token_ids`.

        A drafter that learns compares `candidate.token_ids` with its earlier draft tokens. Not all of them were
        verified.
        """
        ...

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop the state of finished sequences.

        Args:
            is_unfinished: whether the sequence of an id still waits or runs.
        """
        ...
