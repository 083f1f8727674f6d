"""`Speculation`: how many guessed tokens of which sequences a step computes.

Every guessed token costs a row, and saves a part of a step if it is right. The most likely ones come first, and as many
are taken as make the most tokens a second: those that the step is expected to give, divided by how long it takes. Where
rows are expensive or guesses fail, that is none.

Guessing itself takes time, too. It may take a hundredth of the time of all steps, and what guesses have saved.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul

from inflight.contracts.speculation import Candidate
from inflight.speculation.guesser import Guess, Guesser
from inflight.speculation.step_times import StepTimes

LEAST_GAIN = 1.01
"""Guesses must be expected to make a step at least so many times as good: what is expected is not known exactly."""
SHARE_OF_TIME = 0.01
"""How much of the time of steps guessing may take if it saves nothing."""
MOST_CREDIT = 0.1
"""How many seconds guessing may take at most until it has to save some again."""


class Speculation:
    """Guesses for one scheduler.

    Args:
        guesser: what may come next.
        max_guessed_tokens: of a sequence in one step.
        times: how long steps take.
        clock: seconds, for how long guessing takes.
    """

    def __init__(
        self,
        guesser: Guesser,
        max_guessed_tokens: int,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.times = StepTimes() if times is None else times
        self.max_guessed_tokens = max_guessed_tokens
        self._guesser = guesser
        self._clock = clock
        self._credit = MOST_CREDIT

    @property
    def is_ready(self) -> bool:
        """Whether guessing may take time now, and it is known how long steps take."""
        return self._credit > 0 and self.times.seconds(1) is not None

    def guess(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> list[Sequence[int]]:
        """The guessed tokens of each candidate that are worth their rows; see `Speculator`."""
        start = self._clock()
        guesses = [self._guess(each) for each in candidates]
        chances = [accumulate(each.chances, mul) for each in guesses]
        places = sorted(((chance, place) for place, each in enumerate(chances) for chance in each), reverse=True)
        num_taken = self._num_worth([chance for chance, _ in places[:budget]], num_tokens, num_sequences)
        lengths = [0] * len(candidates)
        for _, place in places[:num_taken]:
            lengths[place] += 1
        self._credit -= self._clock() - start
        return [guess.token_ids[:length] for guess, length in zip(guesses, lengths, strict=True)]

    def see(self, num_tokens: int, seconds: float, num_guessed: int, num_accepted: int, num_sequences: int) -> None:
        """Learn from a step that has run.

        Args:
            num_tokens: of the step, with guesses.
            num_guessed, num_accepted: guessed tokens, and how many of them were right.
            num_sequences: how many sequences it gave a token.
        """
        self.times.see(num_tokens, seconds)
        saved = 0.0
        without = self.times.seconds(num_tokens - num_guessed)
        if num_guessed and without is not None:
            saved = num_accepted * without / num_sequences - (seconds - without)
        self._credit = min(self._credit + SHARE_OF_TIME * seconds + saved, MOST_CREDIT)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Keep nothing for sequences that have ended; see `Guesser`."""
        self._guesser.keep_only(is_unfinished)

    def start_over(self) -> None:
        """Forget all sequences, but not how long steps take."""
        self._guesser.start_over()

    def _guess(self, candidate: Candidate) -> Guess:
        guess, stop_token_ids = self._guesser.guess(candidate), candidate.stop_token_ids
        if stop_token_ids.isdisjoint(guess.token_ids):
            return guess
        useful = list(takewhile(lambda each: each not in stop_token_ids, guess.token_ids))
        return Guess(useful, guess.chances[: len(useful)])

    def _num_worth(self, chances: Sequence[float], num_tokens: int, num_sequences: int) -> int:
        """How many of the guesses with these chances `[n]`, the best first, make the most tokens a second."""
        without = self.times.seconds(num_tokens)
        if without is None:
            return 0
        best, num_best, expected = LEAST_GAIN * num_sequences / without, 0, float(num_sequences)
        for number, chance in enumerate(chances, 1):
            expected += chance
            rate = expected / (self.times.seconds(num_tokens + number) or without)
            if rate > best:
                best, num_best = rate, number
        return num_best
