"""`Constrained`: draft tokens for sequences that must follow a grammar.

Where the grammar forces the next text, that text is drafted as the tokenizer splits it; the model may still split it
differently. Elsewhere another drafter's tokens are taken, as far as the grammar allows them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation.drafter import NO_DRAFT, Drafter, DraftTokens

MEMORY = 0.98
"""The decay of earlier outcomes at each new one."""


class Grammars(Protocol):
    """The grammars of an engine's sequences."""

    def follows(self, sequence_id: int) -> bool:
        """Whether this sequence has a grammar and has begun."""
        ...

    def forced(self, sequence_id: int, output: Sequence[int]) -> list[int]:
        """Return the tokens that its grammar forces after this output; none if there is a choice."""
        ...

    def num_allowed(self, sequence_id: int, output: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow this output."""
        ...


class Constrained:
    """Drafts for sequences with and without grammars; see `Drafter`.

    Args:
        grammars: returns the grammars; None: no sequence has had one yet.
        drafter: drafts where the grammar forces nothing; None: none.
    """

    def __init__(self, grammars: Callable[[], Grammars | None], drafter: Drafter | None) -> None:
        self._grammars = grammars
        self._drafter = drafter
        self._forced: dict[int, tuple[int, list[int]]] = {}  # the last draft tokens, and after how many tokens
        self._num_right = self._num_tried = 1.0

    def propose(self, candidate: Candidate) -> DraftTokens:
        """Propose the forced tokens, else another drafter's that the grammar allows."""
        grammars, sequence_id = self._grammars(), candidate.sequence_id
        if grammars is None or not grammars.follows(sequence_id):
            return self._ask(candidate)
        self._learn(candidate)
        output = candidate.token_ids[candidate.num_prompt_tokens :]
        forced = grammars.forced(sequence_id, output)[: candidate.max_draft_tokens]
        if forced:
            self._forced[sequence_id] = len(candidate.token_ids), forced
            return DraftTokens(forced, [self._num_right / self._num_tried] * len(forced))
        token_ids, chances = self._ask(candidate)
        num_allowed = grammars.num_allowed(sequence_id, output, token_ids)
        return DraftTokens(token_ids[:num_allowed], chances[:num_allowed])

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop finished sequences."""
        for sequence_id in [each for each in self._forced if not is_unfinished(each)]:
            del self._forced[sequence_id]
        if self._drafter is not None:
            self._drafter.keep_only(is_unfinished)

    def _ask(self, candidate: Candidate) -> DraftTokens:
        return NO_DRAFT if self._drafter is None else self._drafter.propose(candidate)

    def _learn(self, candidate: Candidate) -> None:
        """Learn how many of the last draft tokens were right."""
        num_before, forced = self._forced.pop(candidate.sequence_id, (0, []))
        for proposed, token_id in zip(forced, candidate.token_ids[num_before:], strict=False):
            self._num_tried = self._num_tried * MEMORY + 1.0
            self._num_right = self._num_right * MEMORY + (proposed == token_id)
            if proposed != token_id:
                break
