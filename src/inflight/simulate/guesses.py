"""`GuessRate`: how often a drafter guesses, and how often it is right; and a drafter that is right as often.

How many guesses run is the engine's own decision (`Speculation`), by what steps cost on the virtual clock. What
guessing itself costs is not simulated.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.contracts.record import StepRecord
from inflight.contracts.speculation import Candidate
from inflight.speculation import Guess
from inflight.speculation.guesser import NOTHING

LARGEST_TOKEN = 0x7FFFFFFF
WRONG = -1


@dataclass(frozen=True, slots=True)
class GuessRate:
    """How good guesses are.

    Attributes:
        acceptance: how likely a guessed token is right if those before it are.
        share: of a sequence's decodes, in how many there is something to guess.
    """

    acceptance: float
    share: float = 1.0

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> "GuessRate | None":
        """That of recorded steps; None: nothing was guessed in them."""
        decodes = [span for step in steps for span in step.spans if span.kind == "decode"]
        guesses = [span for span in decodes if span.num_guessed]
        if not guesses:
            return None
        num_right = sum(span.num_accepted for span in guesses)
        num_tried = sum(min(span.num_accepted + 1, span.num_guessed) for span in guesses)
        return cls(num_right / num_tried, len(guesses) / len(decodes))


def generated_token(sequence_id: int) -> int:
    """The token that a simulated sequence consists of."""
    return sequence_id & LARGEST_TOKEN


class SimulatedGuesser:
    """A `Guesser` that is right as often as a rate says, by chance."""

    def __init__(self, rate: GuessRate, seed: int = 0) -> None:
        self._rate = rate
        self._rng = random.Random(seed)

    def guess(self, candidate: Candidate) -> Guess:
        """See `Guesser`."""
        rate, rng, most = self._rate, self._rng, candidate.max_guessed_tokens
        if rng.random() >= rate.share:
            return NOTHING
        num_right = next((number for number in range(most) if rng.random() >= rate.acceptance), most)
        right = generated_token(candidate.sequence_id)
        return Guess([right] * num_right + [WRONG] * (most - num_right), [rate.acceptance] * most)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """See `Guesser`."""
