"""`Guesser`: one way to guess what comes next in a sequence, and how often it is right."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inflight.contracts.speculation import Candidate


class Guess(NamedTuple):
    """Tokens that may come next.

    Attributes:
        chances: of each token, how likely it is right if all before it are; from 0 to 1.
    """

    token_ids: Sequence[int]
    chances: Sequence[float]


NOTHING = Guess((), ())


class Guesser(Protocol):
    """Guesses for one sequence at a time."""

    def guess(self, candidate: Candidate) -> Guess:
        """Return at most `candidate.max_guessed_tokens` tokens that may follow `candidate.token_ids`.

        A guesser that learns finds what became of earlier guesses in `candidate.token_ids`. Not all that is guessed
        was computed.
        """
        ...

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Keep nothing for sequences that have ended.

        Args:
            is_unfinished: whether the sequence of an id still waits or runs.
        """
        ...
