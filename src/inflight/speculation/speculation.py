"""`Speculation`: how many guessed tokens of which sequences a step computes.

Every guessed token costs a row, and saves a part of a step if it is right. The most likely ones come first, and as many
are taken as make the most tokens a second: those that the step is expected to give, divided by how long it takes. Where
rows are expensive or guesses fail, that is none.

Guessing itself takes time, too. It may take a hundredth of the time of all steps, and what guesses have saved. A draft
model takes much more: before it is asked, what it is expected to be right about is weighed against how long it takes,
and it guesses only for those sequences about which nobody else knows as much.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul

from inflight.contracts.speculation import Candidate
from inflight.speculation.drafting import Drafting
from inflight.speculation.guesser import NOTHING, Guess, Guesser
from inflight.speculation.step_times import StepTimes

LEAST_GAIN = 1.01
"""Guesses must be expected to make a step at least so many times as good: what is expected is not known exactly."""
LEAST_GAIN_OF_DRAFT = 1.05
"""The same for asking a draft model."""
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
        drafting: the draft model, if there is one.
    """

    def __init__(
        self,
        guesser: Guesser,
        max_guessed_tokens: int,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafting: Drafting | None = None,
    ) -> None:
        self.times = StepTimes() if times is None else times
        self.max_guessed_tokens = max_guessed_tokens
        self._guesser = guesser
        self._drafting = drafting
        self._clock = clock
        self._seconds_drafting = 0.0  # in the step that is planned
        self._credit = MOST_CREDIT

    @property
    def is_ready(self) -> bool:
        """Whether guessing may take time now, and it is known how long steps take."""
        return (self._credit > 0 or self._drafting is not None) and self.times.seconds(1) is not None

    def guess(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> list[Sequence[int]]:
        """The guessed tokens of each candidate that are worth their rows; see `Speculator`."""
        start = self._clock()
        guesses = [self._guess(each) if self._credit > 0 else NOTHING for each in candidates]
        places, rate = self._best(guesses, num_tokens, num_sequences, budget)
        self._credit -= self._clock() - start
        if self._drafting is not None:
            start = self._clock()
            if self._draft(self._drafting, candidates, guesses, num_tokens, num_sequences, rate):
                places, _ = self._best(guesses, num_tokens, num_sequences, budget)
            self._seconds_drafting = self._clock() - start
        lengths = Counter(places)
        return [guess.token_ids[: lengths[place]] for place, guess in enumerate(guesses)]

    def see(self, num_tokens: int, seconds: float, num_guessed: int, num_accepted: int, num_sequences: int) -> None:
        """Learn from a step that has run.

        Args:
            num_tokens: of the step, with guesses.
            num_guessed, num_accepted: guessed tokens, and how many of them were right.
            num_sequences: how many sequences it gave a token.
        """
        seconds -= self._seconds_drafting
        self._seconds_drafting = 0.0
        self.times.see(num_tokens, seconds)
        saved = 0.0
        without = self.times.seconds(num_tokens - num_guessed)
        if num_guessed and without is not None:
            saved = num_accepted * without / num_sequences - (seconds - without)
        self._credit = min(self._credit + SHARE_OF_TIME * seconds + saved, MOST_CREDIT)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Keep nothing for sequences that have ended; see `Guesser`."""
        self._guesser.keep_only(is_unfinished)
        if self._drafting is not None:
            self._drafting.keep_only(is_unfinished)

    def start_over(self) -> None:
        """Forget all sequences, but not how long steps take."""
        self._guesser.start_over()
        self._seconds_drafting = 0.0
        if self._drafting is not None:
            self._drafting.start_over()

    def _guess(self, candidate: Candidate) -> Guess:
        guess, stop_token_ids = self._guesser.guess(candidate), candidate.stop_token_ids
        if stop_token_ids.isdisjoint(guess.token_ids):
            return guess
        useful = list(takewhile(lambda each: each not in stop_token_ids, guess.token_ids))
        return Guess(useful, guess.chances[: len(useful)])

    def _best(
        self, guesses: Sequence[Guess], num_tokens: int, num_sequences: int, budget: int
    ) -> tuple[list[int], float]:
        """The places of the guesses of which one token more makes the most tokens a second, and how many these are."""
        without = self.times.seconds(num_tokens)
        if without is None:
            return [], 0.0
        chances = ((chance, place) for place, each in enumerate(guesses) for chance in accumulate(each.chances, mul))
        likely = sorted(chances, reverse=True)[:budget]
        rate, num_best, expected = num_sequences / without, 0, float(num_sequences)
        least = LEAST_GAIN * rate
        for number, (chance, _) in enumerate(likely, 1):
            expected += chance
            with_guesses = expected / (self.times.seconds(num_tokens + number) or without)
            if with_guesses > max(rate, least):
                rate, num_best = with_guesses, number
        return [place for _, place in likely[:num_best]], rate

    def _draft(
        self,
        drafting: Drafting,
        candidates: Sequence[Candidate],
        guesses: list[Guess],
        num_tokens: int,
        num_sequences: int,
        rate: float,
    ) -> bool:
        """Replace guesses by a draft model's where that makes more than `rate` tokens a second; return whether any."""
        known = [sum(accumulate(each.chances, mul)) for each in guesses]
        chances = [drafting.chance(each) for each in candidates]
        drafted = [place for place, chance in enumerate(chances) if chance / (1 - min(chance, 0.99)) > known[place]]
        asked = [candidates[place] for place in drafted]
        num_others = sum(len(guess.token_ids) for guess in guesses) - sum(
            len(guesses[place].token_ids) for place in drafted
        )
        expected = num_sequences + sum(known) - sum(known[place] for place in drafted)
        best, best_rate, likely = 0, LEAST_GAIN_OF_DRAFT * rate, [1.0] * len(drafted)
        for length in range(1, self.max_guessed_tokens + 1) if drafted else ():
            likely = [each * chances[place] for each, place in zip(likely, drafted, strict=True)]
            expected += sum(likely)
            seconds = self.times.seconds(num_tokens + num_others + length * len(drafted)) or 0.0
            with_draft = expected / (seconds + drafting.seconds(asked, length))
            if with_draft > best_rate:
                best, best_rate = length, with_draft
        if best == 0:
            drafting.do_without()
            return False
        for place, guess in zip(drafted, drafting.guess(asked, best), strict=True):
            if guess.token_ids:
                guesses[place] = guess
        return True
