"""`Speculation`: decides how many draft tokens of which sequences a step verifies.

Every draft token costs a row, and saves part of a step if accepted. The most likely ones are taken first, as many as
maximise tokens per second: the step's expected tokens divided by its time. Where rows are expensive or draft tokens are
rejected, that is none.

Drafting may take 1 % of all steps' time, plus the time that draft tokens have saved. A draft model takes much more:
before it runs, its expected gain is weighed against its time, and it drafts only for sequences where it beats the other
drafters.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation.draft_model import DraftModelProposer
from inflight.speculation.drafter import NO_DRAFT, Drafter, DraftTokens
from inflight.speculation.step_times import StepTimes

LEAST_GAIN = 1.01
"""The least expected gain of draft tokens, as a factor: expectations are inexact."""
LEAST_GAIN_OF_DRAFT = 1.05
"""The same for asking a draft model."""
SHARE_OF_TIME = 0.01
"""The share of steps' time that drafting may take if it saves nothing."""
FEWEST_STEPS_WITH_DRAFTS, MOST_STEPS_WITH_DRAFTS = 4, 100
"""Steps, initially and finally, after which one runs without draft tokens, to measure its time."""
CALIBRATION_MEMORY, CALIBRATION_WEIGHT, CALIBRATION_FORGETTING = 0.99, 10.0, 0.998
"""Calibration of chances by expected and accepted tokens: the decay at each step with draft tokens, the prior's weight
in tokens, and the decay at each step without, so that drafting is eventually tried again. It is needed because choosing
the best chances favours overestimated ones."""
MOST_CREDIT = 0.1
"""Most seconds that drafting may take before it must save some again."""


class PlannedStep(NamedTuple):
    """A step without draft tokens: its tokens, the sequences that get one, and the budget for draft tokens."""

    num_tokens: int
    num_sequences: int
    budget: int


class Speculation:
    """Chooses the draft tokens of one scheduler.

    Args:
        drafter: proposes draft tokens.
        max_draft_tokens: of a sequence in one step.
        times: how long steps take.
        clock: seconds, for how long drafting takes.
        proposer: the draft model, if there is one.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_draft_tokens: int,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
        proposer: DraftModelProposer | None = None,
    ) -> None:
        self.times = StepTimes() if times is None else times
        self.max_draft_tokens = max_draft_tokens
        self._drafter = drafter
        self._proposer = proposer
        self._clock = clock
        self._seconds_drafting = 0.0  # for the planned step
        self._credit = MOST_CREDIT
        self._num_expected = self._num_accepted = 0.0  # tokens
        self._num_expected_now = 0.0  # in the planned step
        self._num_with_drafts = 0  # steps since the last one without
        self._most_with_drafts = FEWEST_STEPS_WITH_DRAFTS

    @property
    def is_ready(self) -> bool:
        """Whether drafting may take time now, and step times are known."""
        return (self._credit > 0 or self._proposer is not None) and self.times.seconds(1) is not None

    def propose(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> list[Sequence[int]]:
        """The draft tokens of each candidate that are worth their rows; see `Speculator`."""
        if not self.times.knows(num_tokens) or self._num_with_drafts >= self._most_with_drafts:
            return [()] * len(candidates)
        step = PlannedStep(num_tokens, num_sequences, budget)
        start = self._clock()
        drafts = [self._propose(each) if self._credit > 0 else NO_DRAFT for each in candidates]
        places, rate = self._best(drafts, step)
        self._credit -= self._clock() - start
        if self._proposer is not None and self._draft(self._proposer, candidates, drafts, step, rate):
            places, _ = self._best(drafts, step)
        self._seconds_drafting = self._clock() - start
        lengths = Counter(places)
        self._num_expected_now = sum(
            sum(accumulate(draft.chances[: lengths[place]], mul)) for place, draft in enumerate(drafts)
        )
        return [draft.token_ids[: lengths[place]] for place, draft in enumerate(drafts)]

    def observe(
        self, num_tokens: int, seconds: float, num_draft_tokens: int, num_accepted: int, num_sequences: int
    ) -> None:
        """Learn from a step that has run.

        Args:
            num_tokens: of the step, with draft tokens.
            num_draft_tokens, num_accepted: draft tokens, and how many of them were right.
            num_sequences: sequences that got a token.
        """
        seconds -= self._seconds_drafting
        self._seconds_drafting = 0.0
        self.times.observe(num_tokens, seconds)
        if num_draft_tokens:
            self._num_with_drafts += 1
            self._num_expected = self._num_expected * CALIBRATION_MEMORY + self._num_expected_now
            self._num_accepted = self._num_accepted * CALIBRATION_MEMORY + num_accepted
        else:
            self._num_expected *= CALIBRATION_FORGETTING
            self._num_accepted *= CALIBRATION_FORGETTING
            if self._num_with_drafts >= self._most_with_drafts:
                self._most_with_drafts = min(2 * self._most_with_drafts, MOST_STEPS_WITH_DRAFTS)
            self._num_with_drafts = 0
        saved = 0.0
        without = self.times.seconds(num_tokens - num_draft_tokens)
        if num_draft_tokens and without is not None:
            saved = num_accepted * without / num_sequences - (seconds - without)
        self._credit = min(self._credit + SHARE_OF_TIME * seconds + saved, MOST_CREDIT)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Keep nothing for sequences that have ended; see `Drafter`."""
        self._drafter.keep_only(is_unfinished)
        if self._proposer is not None:
            self._proposer.keep_only(is_unfinished)

    def _propose(self, candidate: Candidate) -> DraftTokens:
        draft, stop_token_ids = self._drafter.propose(candidate), candidate.stop_token_ids
        if stop_token_ids.isdisjoint(draft.token_ids):
            return draft
        useful = list(takewhile(lambda each: each not in stop_token_ids, draft.token_ids))
        return DraftTokens(useful, draft.chances[: len(useful)])

    def _best(self, drafts: Sequence[DraftTokens], step: PlannedStep) -> tuple[list[int], float]:
        """The draft tokens that maximise tokens per second, each as its draft's index; and that rate."""
        without = self.times.seconds(step.num_tokens)
        if without is None:
            return [], 0.0
        chances = ((chance, place) for place, each in enumerate(drafts) for chance in accumulate(each.chances, mul))
        likely = sorted(chances, reverse=True)[: step.budget]
        rate, num_best, expected = step.num_sequences / without, 0, float(step.num_sequences)
        calibration = min(1.0, (self._num_accepted + CALIBRATION_WEIGHT) / (self._num_expected + CALIBRATION_WEIGHT))
        least = LEAST_GAIN * rate
        for number, (chance, _) in enumerate(likely, 1):
            expected += calibration * chance
            with_drafts = expected / (self.times.seconds(step.num_tokens + number) or without)
            if with_drafts > max(rate, least):
                rate, num_best = with_drafts, number
        return [place for _, place in likely[:num_best]], rate

    def _draft(
        self,
        proposer: DraftModelProposer,
        candidates: Sequence[Candidate],
        drafts: list[DraftTokens],
        step: PlannedStep,
        rate: float,
    ) -> bool:
        """Replace drafts by a draft model's where that makes more than `rate` tokens a second; return whether any."""
        known = [sum(accumulate(each.chances, mul)) for each in drafts]
        chances = [proposer.chance(each) for each in candidates]
        places = [place for place, chance in enumerate(chances) if chance > known[place] * (1 - chance)]
        asked = [candidates[place] for place in places]
        others = set(range(len(candidates))).difference(places)
        num_tokens = step.num_tokens + sum(len(drafts[place].token_ids) for place in others)
        expected = step.num_sequences + sum(known[place] for place in others)
        best, best_rate, likely = 0, LEAST_GAIN_OF_DRAFT * rate, [1.0] * len(places)
        for length in range(1, self.max_draft_tokens + 1) if places else ():
            likely = [each * chances[place] for each, place in zip(likely, places, strict=True)]
            expected += sum(likely)
            of_step = self.times.seconds(num_tokens + length * len(places)) or 0.0
            with_draft = expected / (of_step + proposer.seconds(asked, length))
            if with_draft > best_rate:
                best, best_rate = length, with_draft
        if best == 0:
            proposer.do_without()
            return False
        for place, draft in zip(places, proposer.propose(asked, best), strict=True):
            if draft.token_ids:
                drafts[place] = draft
        return True
