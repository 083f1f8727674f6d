"""`Latencies`: durations counted in classes, from which percentiles are read; a class is a tenth wider than the one
before it, so a percentile is right to within 5 %."""

from math import log

SHORTEST = 1e-5
"""Seconds; all that is shorter is in the first class."""

GROWTH = log(1.1)
NUM_CLASSES = 200
"""The last class begins at half an hour."""


class Latencies:
    """Counts of durations."""

    __slots__ = ("_counts", "number")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.number = 0

    def observe(self, seconds: float, number: int = 1) -> None:
        """Count a duration, so many times."""
        place = min(int(log(seconds / SHORTEST) / GROWTH), NUM_CLASSES - 1) if seconds > SHORTEST else 0
        self._counts[place] = self._counts.get(place, 0) + number
        self.number += number

    def add(self, other: "Latencies") -> None:
        """Count all that another has counted."""
        for place, number in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + number
        self.number += other.number

    def percentile(self, share: float) -> float | None:
        """The duration in seconds that this share of all does not exceed; None: there are none."""
        left = share * self.number
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return float(SHORTEST * 1.1 ** (place + 0.5))
        return None
