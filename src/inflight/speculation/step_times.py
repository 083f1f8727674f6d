"""`StepTimes`: predicts a step's time from its number of tokens, learned from past steps.

Steps of similar size share a running average; times between known averages are interpolated, and never fall with more
tokens. Beyond the largest size, times are assumed to grow slowly, as in memory-bound steps: so larger steps are tried,
and then measured. Pure: callers pass durations in.
"""

from bisect import bisect_left
from itertools import accumulate

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""The largest number of tokens in each class of steps; the last class has all others."""
SMOOTHING = 0.2
"""Weight of the newest duration in a running average."""
LARGEST_SURPRISE = 2.0
"""A duration counts as at most this multiple of the average: a stalled step says nothing about its size."""
UNKNOWN_TOKEN = 0.01
"""The assumed cost of a token beyond the largest known size, as a share of that size's time."""


class StepTimes:
    """Running averages of durations, by size."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # known sizes
        self._seconds: list[float] = []  # the average of each
        self._numbers: list[int] = []  # how many steps it is the average of
        self._least: list[float] = []  # the least average of this size and all larger ones

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        size = SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]
        place = bisect_left(self._sizes, size)
        if self._sizes[place : place + 1] != [size]:
            self._sizes.insert(place, size)
            self._seconds.insert(place, seconds)
            self._numbers.insert(place, 0)
        average = self._seconds[place]
        self._numbers[place] += 1
        share = max(SMOOTHING, 1 / self._numbers[place])
        self._seconds[place] += share * (min(seconds, LARGEST_SURPRISE * average) - average)
        self._least = list(accumulate(reversed(self._seconds), min))[::-1]

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of at most `num_tokens` has run."""
        return bool(self._sizes) and self._sizes[0] <= SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]

    def seconds(self, num_tokens: int) -> float | None:
        """The predicted seconds of a step of `num_tokens`; None: unknown yet."""
        sizes, seconds = self._sizes, self._least
        if not sizes:
            return None
        place = bisect_left(sizes, num_tokens)
        if place == len(sizes):
            return seconds[-1] * (1 + UNKNOWN_TOKEN * (num_tokens - sizes[-1]))
        if place == 0:
            return seconds[0]
        share = (num_tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])
