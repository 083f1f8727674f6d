"""Requests of the lowest priority run in the background: only in steps without other work, under every policy."""

import pytest

from inflight.contracts.api.config import BACKGROUND
from tests.scheduling.helpers import commit, make_scheduler, plan_of, spans_of, step, submit, waiting

POLICIES = [None, 1]


@pytest.mark.parametrize("aging_steps", POLICIES)
def test_a_background_sequence_rests_while_others_run(aging_steps: int | None) -> None:
    scheduler = make_scheduler(aging_steps=aging_steps)
    submit(scheduler, "job", 4, priority=BACKGROUND)
    assert step(scheduler) == [(0, 0, 4)]
    submit(scheduler, "chat", 3, max_output=3)
    assert step(scheduler) == [(1, 0, 3)]
    assert step(scheduler) == [(1, 3, 4)]
    assert step(scheduler) == [(1, 4, 5)]
    assert step(scheduler) == [(0, 4, 5)], "nothing of it was lost"


@pytest.mark.parametrize("aging_steps", POLICIES)
def test_the_background_gets_its_tokens_beside_others_and_no_more(aging_steps: int | None) -> None:
    scheduler = make_scheduler(aging_steps=aging_steps, background_tokens_per_step=2)
    for name in "abc":
        submit(scheduler, name, 1, priority=BACKGROUND)
    submit(scheduler, "d", 9, priority=BACKGROUND)
    assert step(scheduler) == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 9)]
    submit(scheduler, "chat", 3, max_output=2)
    assert step(scheduler) == [(4, 0, 3), (0, 1, 2), (1, 1, 2)]
    submit(scheduler, "later", 5, max_output=1)
    assert step(scheduler) == [(4, 3, 4), (5, 0, 5), (0, 2, 3), (1, 2, 3)]
    assert step(scheduler) == [(0, 3, 4), (1, 3, 4), (2, 1, 2), (3, 9, 10)]


@pytest.mark.parametrize("aging_steps", POLICIES)
def test_a_waiting_sequence_takes_the_slot_and_the_blocks_of_the_background(aging_steps: int | None) -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=2, aging_steps=aging_steps)
    submit(scheduler, "a", 4, priority=BACKGROUND)
    submit(scheduler, "b", 5, priority=BACKGROUND)
    step(scheduler)
    submit(scheduler, "chat", 6, max_output=1)
    assert step(scheduler) == [(2, 0, 6)]
    assert waiting(scheduler) == [1], "the later one made room"
    assert step(scheduler) == [(0, 4, 5), (1, 0, 6)]


def test_a_growing_sequence_takes_blocks_from_the_background_first() -> None:
    scheduler = make_scheduler(num_blocks=8)
    submit(scheduler, "job", 3, priority=BACKGROUND)
    step(scheduler)
    submit(scheduler, "chat", 4)
    for _ in range(3):
        step(scheduler)
    assert waiting(scheduler) == [0]


def test_age_never_brings_a_background_sequence_before_others() -> None:
    scheduler = make_scheduler(max_num_seqs=1, aging_steps=1)
    submit(scheduler, "job", 1, priority=BACKGROUND)
    for number in range(200):
        submit(scheduler, f"chat {number}", 1, max_output=1)
        assert step(scheduler) == [(number + 1, 0, 1)]
    assert step(scheduler) == [(0, 0, 1)]


def test_a_background_prefill_runs_in_small_steps_because_others_may_come() -> None:
    scheduler = make_scheduler(max_prefill_tokens_per_step=5)
    submit(scheduler, "job", 12, priority=BACKGROUND)
    assert step(scheduler) == [(0, 0, 5)]
    assert step(scheduler) == [(0, 5, 10)]
    submit(scheduler, "chat", 12, max_output=1)
    assert step(scheduler) == [(1, 0, 12)]


def test_sequences_that_rest_keep_what_they_have_while_a_step_fails() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "job", 4, priority=BACKGROUND)
    step(scheduler)
    submit(scheduler, "chat", 3)
    scheduler.fail(plan_of(scheduler))
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 4, 5)]
    commit(scheduler, plan)
