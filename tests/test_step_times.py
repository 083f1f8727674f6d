"""`StepTimes` learns only from the durations that it is told."""

import pytest

from inflight.speculation.step_times import StepTimes


def test_times_between_two_known_sizes_lie_on_a_line() -> None:
    known = StepTimes()
    assert known.seconds(3) is None
    known.observe(1, 2.0)
    known.observe(5, 4.0)
    assert known.seconds(1) == 2.0
    assert known.seconds(3) == pytest.approx(3.0)
    assert known.seconds(5) == 4.0
    assert 4.0 < (known.seconds(9) or 0) < 4.5


def test_a_step_that_was_held_up_hardly_counts() -> None:
    known = StepTimes()
    for seconds in (*[1.0] * 5, 1000.0):
        known.observe(1, seconds)
    assert (known.seconds(1) or 0) < 1.25


def test_no_step_takes_longer_than_one_of_more_tokens() -> None:
    known = StepTimes()
    known.observe(8, 3.0)
    known.observe(16, 2.0)
    assert known.seconds(8) == known.seconds(12) == known.seconds(16) == 2.0
