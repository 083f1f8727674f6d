"""`Repeat`: drafts the last token again. An example of a drafter."""

from collections.abc import Callable

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation.drafter import DraftTokens

CHANCE = 0.2


class Repeat:
    """See `Drafter`."""

    def propose(self, candidate: Candidate) -> DraftTokens:
        """Propose one token."""
        return DraftTokens([candidate.token_ids[-1]], [CHANCE])

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """It keeps nothing."""
