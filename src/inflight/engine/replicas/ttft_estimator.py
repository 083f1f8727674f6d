"""`TtftEstimator`: estimates the time to first token, learned from finished prefills. Pure."""

from dataclasses import dataclass

import numpy as np

FORGETTING = 0.98
"""The decay of earlier observations at each new one."""
LARGEST_SURPRISE = 3.0
"""An observation counts as at most this multiple of the expected time: a stalled replica says nothing about load."""
MIN_SECONDS = 1e-6
"""Errors are relative to the time, but to no less than this."""
FIRST_ESTIMATE = np.array([0.01, 2e-4, 2e-3])
"""Initial seconds per request, per token owed and per running sequence; scaled to the machine's pace."""
TRUST = 0.05
"""The weight of the first estimate, in requests."""


@dataclass(slots=True)
class ReplicaLoad:
    """A replica's load when a request arrives.

    Attributes:
        num_owed: uncomputed prompt tokens.
        num_running: unfinished sequences.
    """

    num_owed: int = 0
    num_running: int = 0


class TtftEstimator:
    """Time to first token as a linear function of a replica's load: non-negative least squares on relative errors, with
    exponential decay. Beyond the slots, a request also waits for others to end.

    Args:
        num_slots: how many sequences run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._seconds_of_run = 0.0
        self._line = FIRST_ESTIMATE
        self._pace = 1.0
        self._squares = np.zeros((3, 3))  # normal equations
        self._targets = np.zeros(3)

    def seconds(self, load: ReplicaLoad) -> float:
        """The expected time for a request whose own tokens are among those owed."""
        offset, per_token, per_sequence = self._line.tolist()
        beyond = max(0, load.num_running + 1 - self._num_slots)
        waiting = beyond * self._seconds_of_run / self._num_slots
        return float(offset + per_token * load.num_owed + per_sequence * load.num_running + waiting)

    def observe_first_token(self, load: ReplicaLoad, seconds: float) -> None:
        """Learn from a request that got its first token `seconds` after meeting this load."""
        if load.num_running >= self._num_slots:
            return
        is_first, seconds = not self._targets.any(), max(MIN_SECONDS, seconds)
        if not is_first:
            seconds = min(seconds, LARGEST_SURPRISE * max(MIN_SECONDS, self.seconds(load)))
        sizes = np.array([1.0, load.num_owed, load.num_running])
        pace = seconds / float(FIRST_ESTIMATE @ sizes)
        self._pace = pace if is_first else FORGETTING * self._pace + (1 - FORGETTING) * pace
        self._squares = FORGETTING * self._squares + np.outer(sizes, sizes) / seconds**2
        self._targets = FORGETTING * self._targets + sizes / seconds
        self._line = self._solved()

    def observe_run(self, seconds: float) -> None:
        """Learn from a request that ended `seconds` after its first token."""
        self._seconds_of_run += (1 - FORGETTING if self._seconds_of_run else 1.0) * (seconds - self._seconds_of_run)

    def _solved(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        line, kept, estimate = np.zeros(3), [0, 1, 2], self._pace * FIRST_ESTIMATE
        squares, targets = self._squares + np.diag(TRUST / estimate**2), self._targets + TRUST / estimate
        while kept:
            values = np.linalg.solve(squares[np.ix_(kept, kept)], targets[kept])
            if values.min() >= 0:
                line[kept] = values
                break
            del kept[int(values.argmin())]
        return line
