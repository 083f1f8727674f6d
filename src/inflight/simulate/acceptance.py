"""`AcceptanceRate`: how often there are draft tokens, and how often they are accepted; and a drafter with that rate.

The engine's own `Speculation` decides how many draft tokens run, by step costs on the virtual clock. The cost of
drafting itself is not simulated.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.contracts.step.record import StepRecord
from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import DraftTokens
from inflight.speculation.drafter import NO_DRAFT

LARGEST_TOKEN = 0x7FFFFFFF
WRONG = -1


@dataclass(frozen=True, slots=True)
class AcceptanceRate:
    """The quality of draft tokens.

    Attributes:
        acceptance: probability that a draft token is accepted if those before it are.
        share: of a sequence's decodes, how many have draft tokens.
    """

    acceptance: float
    share: float = 1.0

    @classmethod
    def from_steps(cls, steps: Iterable[StepRecord]) -> "AcceptanceRate | None":
        """The rate of recorded steps; None: they have no draft tokens."""
        decodes = [span for step in steps for span in step.spans if span.kind == "decode"]
        drafts = [span for span in decodes if span.num_draft_tokens]
        if not drafts:
            return None
        num_right = sum(span.num_accepted for span in drafts)
        num_tried = sum(min(span.num_accepted + 1, span.num_draft_tokens) for span in drafts)
        return cls(num_right / num_tried, len(drafts) / len(decodes))


def generated_token(sequence_id: int) -> int:
    """The token that a simulated sequence consists of."""
    return sequence_id & LARGEST_TOKEN


class SimulatedDrafter:
    """A `Drafter` that is right at random, at a given rate."""

    def __init__(self, rate: AcceptanceRate, seed: int = 0) -> None:
        self._rate = rate
        self._rng = random.Random(seed)

    def propose(self, candidate: Candidate) -> DraftTokens:
        """See `Drafter`."""
        rate, rng, most = self._rate, self._rng, candidate.max_draft_tokens
        if rng.random() >= rate.share:
            return NO_DRAFT
        num_right = next((number for number in range(most) if rng.random() >= rate.acceptance), most)
        right = generated_token(candidate.sequence_id)
        return DraftTokens([right] * num_right + [WRONG] * (most - num_right), [rate.acceptance] * most)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """See `Drafter`."""
