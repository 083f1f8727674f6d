"""`Speculation`: how many guessed tokens of which sequences a step computes.

Every guessed token costs a row, and saves a part of a step if it is right. The most likely ones come first, and as many
are taken as make the most tokens a second: those that the step is expected to give, divided by how long it takes. Where
rows are expensive or guesses fail, that is none.

Guessing itself takes time, too. It may take a hundredth of the time of all steps, and what guesses have saved. A draft
model takes much more: before it is asked, what it is expected to be right about is weighed against how long it takes,
and it guesses only for sequences about which nothing else knows as much.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from inflight.contracts.speculation import Candidate
from inflight.speculation.drafting import Drafting
from inflight.speculation.guesser import NOTHING, Guess, Guesser
from inflight.speculation.step_times import StepTimes

LEAST_GAIN = 1.01
"""The factor by which guesses must be expected to improve a step: what is expected is not known exactly."""
LEAST_GAIN_OF_DRAFT = 1.05
"""The same for asking a draft model."""
SHARE_OF_TIME = 0.01
"""How much of the time of steps guessing may take if it saves nothing."""
FEWEST_STEPS_WITH_GUESSES, MOST_STEPS_WITH_GUESSES = 4, 100
"""Steps, at first and in the end, after which one has no guesses, to measure how long it takes then."""
CANDOUR_MEMORY, CALIBRATION_WEIGHT, CANDOUR_FORGETTING = 0.99, 10.0, 0.998
"""How much of what was hoped for, and what came of it, counts after each step with guesses; and for how many tokens it
counts that hopes come true. Of many guesses those are taken whose chances were overestimated. After a step without
guesses less of it counts: in the end it is tried again."""
MOST_CREDIT = 0.1
"""How many seconds guessing may take at most until it has to save some again."""


class Step(NamedTuple):
    """A step without guesses: its tokens, how many sequences it gives one, and how many tokens may be added."""

    num_tokens: int
    num_sequences: int
    budget: int


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
        self._seconds_guessing = 0.0  # for the step that is planned
        self._credit = MOST_CREDIT
        self._num_hoped = self._num_come = 0.0  # tokens
        self._num_hoped_now = 0.0  # in the step that is planned
        self._num_with_guesses = 0  # steps since the last without
        self._most_with_guesses = FEWEST_STEPS_WITH_GUESSES

    @property
    def is_ready(self) -> bool:
        """Whether guessing may take time now, and it is known how long steps take."""
        return (self._credit > 0 or self._drafting is not None) and self.times.seconds(1) is not None

    def guess(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> list[Sequence[int]]:
        """The guessed tokens of each candidate that are worth their rows; see `Speculator`."""
        if not self.times.knows(num_tokens) or self._num_with_guesses >= self._most_with_guesses:
            return [()] * len(candidates)
        step = Step(num_tokens, num_sequences, budget)
        start = self._clock()
        guesses = [self._guess(each) if self._credit > 0 else NOTHING for each in candidates]
        places, rate = self._best(guesses, step)
        self._credit -= self._clock() - start
        if self._drafting is not None and self._draft(self._drafting, candidates, guesses, step, rate):
            places, _ = self._best(guesses, step)
        self._seconds_guessing = self._clock() - start
        lengths = Counter(places)
        self._num_hoped_now = sum(
            sum(accumulate(guess.chances[: lengths[place]], mul)) for place, guess in enumerate(guesses)
        )
        return [guess.token_ids[: lengths[place]] for place, guess in enumerate(guesses)]

    def observe(self, num_tokens: int, seconds: float, num_guessed: int, num_accepted: int, num_sequences: int) -> None:
        """Learn from a step that has run.

        Args:
            num_tokens: of the step, with guesses.
            num_guessed, num_accepted: guessed tokens, and how many of them were right.
            num_sequences: how many sequences it gave a token.
        """
        seconds -= self._seconds_guessing
        self._seconds_guessing = 0.0
        self.times.observe(num_tokens, seconds)
        if num_guessed:
            self._num_with_guesses += 1
            self._num_hoped = self._num_hoped * CANDOUR_MEMORY + self._num_hoped_now
            self._num_come = self._num_come * CANDOUR_MEMORY + num_accepted
        else:
            self._num_hoped *= CANDOUR_FORGETTING
            self._num_come *= CANDOUR_FORGETTING
            if self._num_with_guesses >= self._most_with_guesses:
                self._most_with_guesses = min(2 * self._most_with_guesses, MOST_STEPS_WITH_GUESSES)
            self._num_with_guesses = 0
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

    def _guess(self, candidate: Candidate) -> Guess:
        guess, stop_token_ids = self._guesser.guess(candidate), candidate.stop_token_ids
        if stop_token_ids.isdisjoint(guess.token_ids):
            return guess
        useful = list(takewhile(lambda each: each not in stop_token_ids, guess.token_ids))
        return Guess(useful, guess.chances[: len(useful)])

    def _best(self, guesses: Sequence[Guess], step: Step) -> tuple[list[int], float]:
        """The guesses that make the most tokens a second, each as its guess's place; and how many that is."""
        without = self.times.seconds(step.num_tokens)
        if without is None:
            return [], 0.0
        chances = ((chance, place) for place, each in enumerate(guesses) for chance in accumulate(each.chances, mul))
        likely = sorted(chances, reverse=True)[: step.budget]
        rate, num_best, expected = step.num_sequences / without, 0, float(step.num_sequences)
        calibration = min(1.0, (self._num_come + CALIBRATION_WEIGHT) / (self._num_hoped + CALIBRATION_WEIGHT))
        least = LEAST_GAIN * rate
        for number, (chance, _) in enumerate(likely, 1):
            expected += calibration * chance
            with_guesses = expected / (self.times.seconds(step.num_tokens + number) or without)
            if with_guesses > max(rate, least):
                rate, num_best = with_guesses, number
        return [place for _, place in likely[:num_best]], rate

    def _draft(
        self, drafting: Drafting, candidates: Sequence[Candidate], guesses: list[Guess], step: Step, rate: float
    ) -> bool:
        """Replace guesses by a draft model's where that makes more than `rate` tokens a second; return whether any."""
        known = [sum(accumulate(each.chances, mul)) for each in guesses]
        chances = [drafting.chance(each) for each in candidates]
        places = [place for place, chance in enumerate(chances) if chance > known[place] * (1 - chance)]
        asked = [candidates[place] for place in places]
        others = set(range(len(candidates))).difference(places)
        num_tokens = step.num_tokens + sum(len(guesses[place].token_ids) for place in others)
        expected = step.num_sequences + sum(known[place] for place in others)
        best, best_rate, likely = 0, LEAST_GAIN_OF_DRAFT * rate, [1.0] * len(places)
        for length in range(1, self.max_guessed_tokens + 1) if places else ():
            likely = [each * chances[place] for each, place in zip(likely, places, strict=True)]
            expected += sum(likely)
            of_step = self.times.seconds(num_tokens + length * len(places)) or 0.0
            with_draft = expected / (of_step + drafting.seconds(asked, length))
            if with_draft > best_rate:
                best, best_rate = length, with_draft
        if best == 0:
            drafting.do_without()
            return False
        for place, guess in zip(places, drafting.guess(asked, best), strict=True):
            if guess.token_ids:
                guesses[place] = guess
        return True
