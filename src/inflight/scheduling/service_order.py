"""`ServiceOrder`: the order in which sequences are served; they are preempted in reverse.

Background sequences come after all others. Among the others, effective priority = priority - floor(steps since arrival
/ aging_steps); lower is served first, equals in order of arrival. So no sequence starves while others keep coming.
Steps count from arrival, also while a sequence runs: a later one of no better priority can never overtake it.
"""

from typing import TypeAlias

from inflight.contracts.config import BACKGROUND
from inflight.scheduling.sequence import Sequence

Rank: TypeAlias = tuple[int, int]
"""(priority, sequence id): the smaller is served first."""

_IN_BACKGROUND = -1
"""The residue of all background sequences: their order never changes."""


class ServiceOrder:
    """The order in which sequences are served.

    Args:
        aging_steps: steps after which a sequence gains one priority; None: first come, first served.
    """

    def __init__(self, aging_steps: int | None) -> None:
        self._aging_steps = aging_steps

    def effective_priority(self, sequence: Sequence, now: int) -> int:
        """A sequence's priority in step `now`; 0 without priorities, except in the background."""
        if sequence.is_background:
            return BACKGROUND
        if self._aging_steps is None:
            return 0
        return sequence.request.priority - (now - sequence.arrival) // self._aging_steps

    def rank(self, sequence: Sequence, now: int) -> Rank:
        """A sequence's rank in step `now`."""
        return self.effective_priority(sequence, now), sequence.sequence_id

    # Written out, floor((now - arrival) / aging_steps) differs among sequences of equal `arrival % aging_steps` only by
    # a constant. Within such a residue the order therefore never changes.

    def fixed_rank(self, sequence: Sequence) -> tuple[int, Rank]:
        """A sequence's residue, and its constant rank within that residue."""
        if sequence.is_background:
            return _IN_BACKGROUND, (BACKGROUND, sequence.sequence_id)
        if self._aging_steps is None:
            return 0, (0, sequence.sequence_id)
        quotient, residue = divmod(sequence.arrival, self._aging_steps)
        return residue, (sequence.request.priority + quotient, sequence.sequence_id)

    def rank_at(self, residue: int, fixed_rank: Rank, now: int) -> Rank:
        """The rank in step `now` of a sequence with this `fixed_rank`."""
        if self._aging_steps is None or residue == _IN_BACKGROUND:
            return fixed_rank
        return fixed_rank[0] - (now - residue) // self._aging_steps, fixed_rank[1]
