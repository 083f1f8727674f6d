"""The number of draft tokens that pay for their rows."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import DraftTokens, Speculation
from inflight.speculation.step_times import StepTimes


class Told:
    """Drafts what it is told, with the given chances."""

    def __init__(self, *chances: list[float]) -> None:
        self.chances = chances or ([],)

    def propose(self, candidate: Candidate) -> DraftTokens:
        chances = self.chances[candidate.sequence_id][: candidate.max_draft_tokens]
        return DraftTokens([7 + place for place in range(len(chances))], chances)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        pass


def candidates(number: int, **others: object) -> list[Candidate]:
    return [Candidate(each, [1, 2], 1, 100, **others) for each in range(number)]  # type: ignore[arg-type]


def times(fixed: float, per_token: float) -> StepTimes:
    """Steps of these costs, all known."""
    known = StepTimes()
    for number in range(1, 129):
        known.observe(number, fixed + per_token * number)
    return known


def lengths(drafter: Told, known: StepTimes, number: int, budget: int = 1000) -> list[int]:
    drafts = Speculation(drafter, 16, known).propose(candidates(number), number, number, budget)
    return [len(each) for each in drafts]


def test_nothing_is_drafted_before_a_step_was_seen() -> None:
    assert lengths(Told([1.0] * 4), StepTimes(), 1) == [0]


def test_where_rows_cost_nothing_everything_likely_is_tried() -> None:
    assert lengths(Told([0.9] * 5), times(1.0, 0.0), 1) == [5]


def test_where_a_row_costs_a_step_only_certain_draft_tokens_pay() -> None:
    assert lengths(Told([0.9] * 5), times(0.0, 1.0), 1) == [0]


def test_the_likeliest_draft_tokens_of_all_sequences_come_first() -> None:
    taken = lengths(Told([0.3] * 9, [0.99] * 9, [0.9] * 9), times(1.0, 0.1), 3)
    assert taken[1] > taken[2] > taken[0] == 0


def test_no_more_than_the_budget_is_drafted() -> None:
    assert lengths(Told([0.99] * 9, [0.9] * 9), times(1.0, 0.0), 2, budget=4) == [4, 0]


class Slow(Told):
    """A drafter that takes a given time, on its own clock."""

    def __init__(self, seconds: float, *chances: list[float]) -> None:
        super().__init__(*chances)
        self.seconds = seconds
        self.now = 0.0

    def propose(self, candidate: Candidate) -> DraftTokens:
        self.now += self.seconds
        return super().propose(candidate)


def share_of_time(drafter: Slow, num_accepted: int, num_steps: int = 5000) -> float:
    """The share of time that drafting takes, in steps of 1 ms of which `num_accepted` draft tokens are accepted."""
    speculation = Speculation(drafter, 16, times(0.001, 0.0), lambda: drafter.now)
    for _ in range(num_steps):
        num_draft_tokens = 0
        if speculation.is_ready:
            num_draft_tokens = sum(map(len, speculation.propose(candidates(1), 1, 1, 100)))
        speculation.observe(1 + num_draft_tokens, 0.001, num_draft_tokens, min(num_accepted, num_draft_tokens), 1)
    return drafter.now / (num_steps * 0.001)


def test_draft_model_in_vain_takes_a_hundredth_of_the_time() -> None:
    assert share_of_time(Slow(0.0005), 0) == pytest.approx(0.01, abs=0.04)
    assert share_of_time(Slow(0.0005, [0.9] * 4), 0) == pytest.approx(0.01, abs=0.04)


def test_draft_model_that_saves_more_than_it_takes_goes_on() -> None:
    assert share_of_time(Slow(0.0005, [0.9] * 4), 3) == pytest.approx(0.5, abs=0.01)


def test_nothing_is_drafted_after_an_end() -> None:
    speculation = Speculation(Told([1.0] * 9), 16, times(1.0, 0.0))
    assert speculation.propose(candidates(1, stop_token_ids=frozenset([9])), 1, 1, 100) == [[7, 8]]


@given(st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=4), st.floats(0.1, 10), st.floats(0.001, 3))
def test_what_is_taken_is_never_expected_to_be_slower_than_nothing(
    chances: list[list[float]], fixed: float, per_token: float
) -> None:
    known, number = times(fixed, per_token), len(chances)
    taken = lengths(Told(*chances), known, number)

    def rate(lengths: list[int]) -> float:
        gained = 0.0
        for each, length in zip(chances, lengths, strict=True):
            product = 1.0
            for chance in each[:length]:
                product *= chance
                gained += product
        seconds = known.seconds(number + sum(lengths))
        assert seconds is not None
        return (number + gained) / seconds

    assert rate(taken) >= rate([0] * number)
    if not any(taken):  # then no single draft token would pay, either
        assert all(
            rate([i == j and bool(c) for j in range(number)]) <= 1.02 * rate(taken) for i, c in enumerate(chances)
        )


def test_nothing_is_drafted_until_a_step_without_draft_tokens_has_run_and_now_and_then_one_has_none() -> None:
    speculation = Speculation(Told([0.9] * 4), 4)
    speculation.times.observe(64, 1.0)
    assert list(speculation.propose(candidates(1), 1, 1, 100)[0]) == []
    speculation.observe(1, 1.0, 0, 0, 1)
    num_draft_tokens = []
    for _ in range(4 + 1 + 8 + 1 + 16 + 1):
        num_draft_tokens.append(len(speculation.propose(candidates(1), 1, 1, 100)[0]))
        speculation.observe(1 + num_draft_tokens[-1], 1.0, num_draft_tokens[-1], num_draft_tokens[-1], 1)
    assert num_draft_tokens == [*[4] * 4, 0, *[4] * 8, 0, *[4] * 16, 0]


def test_hopes_that_never_come_true_are_given_up_and_in_the_end_tried_again() -> None:
    speculation = Speculation(Told([0.5] * 4), 16, times(1.0, 0.2))

    def num_draft_tokens() -> int:
        (draft,) = speculation.propose(candidates(1), 1, 1, 1000)
        speculation.observe(1 + len(draft), 1.0 + 0.2 * (1 + len(draft)), len(draft), 0, 1)
        return len(draft)

    assert num_draft_tokens() > 0
    first = [num_draft_tokens() for _ in range(300)]
    assert sum(first) > sum(first[200:])
    assert sum(first[200:]) < 10
    assert any(num_draft_tokens() for _ in range(3000))
