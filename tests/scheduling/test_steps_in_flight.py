"""A step in flight: sequences that end meanwhile, how the step lands, and what a plan contains."""

import pickle

import pytest

from inflight.contracts.step.plan import StepPlan
from tests.scheduling.helpers import (
    TOKEN,
    commit,
    full_cache,
    make_scheduler,
    plan_of,
    slots_of,
    spans_of,
    step,
    submit,
)

# ------------------------------------------------------------------------------------- abort and finish


def test_abort_ends_all_running_and_waiting_sequences_of_a_request() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    submit(scheduler, "a", 2, num_sequences=3)
    submit(scheduler, "b", 2)
    step(scheduler)
    aborted = scheduler.abort("a")
    assert [(sequence.index, sequence.finish_reason) for sequence in aborted] == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]
    assert not scheduler.is_unfinished("a")
    assert step(scheduler) == [(3, 0, 2)]


def test_aborting_or_finishing_an_unknown_or_finished_sequence_has_no_effect() -> None:
    scheduler = make_scheduler()
    assert scheduler.abort("nobody") == []
    assert scheduler.finish(5, "stop") is None
    submit(scheduler, "a", 2, max_output=1)
    step(scheduler)
    assert scheduler.abort("a") == []
    assert scheduler.finish(0, "stop") is None
    with pytest.raises(KeyError):
        scheduler.running(0)


def test_a_sequence_aborted_in_flight_keeps_its_slot_and_blocks_until_the_step_is_committed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    submit(scheduler, "a", 3)
    submit(scheduler, "b", 2)
    plan = plan_of(scheduler)
    (aborted,) = scheduler.abort("a")
    assert (aborted.slot, list(aborted.block_tables[0])) == (0, [0, 1, 2])
    assert scheduler.block_pool.num_available == 95
    assert scheduler.num_running == 1
    submit(scheduler, "c", 1)
    progress = commit(scheduler, plan)
    assert [step.sequence.sequence_id for step in progress] == [1], "the tokens of the aborted one are dropped"
    assert aborted.token_ids == [100, 101, 102]
    assert (aborted.slot, list(aborted.block_tables[0])) == (None, [])
    assert scheduler.block_pool.num_available == 98
    assert slots_of(plan_of(scheduler)) == {1: 1, 2: 0}


def test_an_aborted_sequence_outside_the_step_in_flight_releases_its_blocks_at_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    submit(scheduler, "a", 3)
    submit(scheduler, "b", 3)
    scheduler.commit(plan_of(scheduler), [[7] * 6, [7] * 2])
    assert spans_of(plan_of(scheduler)) == [(0, 3, 9)], "the budget has nothing left for the other one"
    (aborted,) = scheduler.abort("b")
    assert (aborted.slot, list(aborted.block_tables[0])) == (None, [])


def test_blocks_are_kept_only_for_the_step_in_flight_and_freed_after_a_failure_or_discard() -> None:
    for release_before in (lambda scheduler, plan: scheduler.fail(plan), lambda scheduler, plan: scheduler.discard()):
        scheduler = make_scheduler()
        submit(scheduler, "a", 3)
        plan = plan_of(scheduler)
        scheduler.abort("a")
        assert scheduler.block_pool.num_available == 97
        release_before(scheduler, plan)
        assert scheduler.block_pool.num_available == 100


def test_finish_keeps_the_given_number_of_output_tokens() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2)
    submit(scheduler, "b", 2)
    submit(scheduler, "c", 2)
    for token in (7, 8, 9):
        step(scheduler, token)
    ended = [scheduler.finish(0, "stop", 1), scheduler.finish(1, "stop", 0), scheduler.finish(2, "stop")]
    assert [sequence and sequence.token_ids for sequence in ended] == [[100, 101, 7], [100, 101], [100, 101, 7, 8, 9]]
    assert [sequence and sequence.finish_reason for sequence in ended] == ["stop"] * 3
    assert scheduler.plan() is None
    assert scheduler.block_pool.num_available == 100


def test_a_failed_step_ends_only_its_own_sequences_with_error() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        submit(scheduler, name, 2)
    step(scheduler)
    failed = scheduler.fail(plan_of(scheduler))
    assert [(sequence.sequence_id, sequence.finish_reason) for sequence in failed] == [(0, "error"), (1, "error")]
    assert [sequence.token_ids for sequence in failed] == [[100, 101, TOKEN]] * 2, "what came before is kept"
    assert step(scheduler) == [(2, 0, 2)]


def test_a_failed_step_does_not_end_an_aborted_sequence_again() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2)
    submit(scheduler, "b", 2)
    plan = plan_of(scheduler)
    (aborted,) = scheduler.abort("a")
    assert [sequence.sequence_id for sequence in scheduler.fail(plan)] == [1]
    assert aborted.finish_reason == "abort"


# ------------------------------------------------------------------------------------- plans


def test_a_step_in_flight_has_to_land_before_the_next_is_planned() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2)
    plan = plan_of(scheduler)
    with pytest.raises(RuntimeError, match="still in flight: commit or fail it first"):
        scheduler.plan()
    assert commit(scheduler, plan)[0].new_token_ids == [TOKEN], "the step in flight is as it was"


def test_only_the_step_in_flight_can_land_and_only_once() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2)
    plan = plan_of(scheduler)
    commit(scheduler, plan)
    with pytest.raises(RuntimeError, match="this plan is not the step in flight"):
        commit(scheduler, plan)
    second = plan_of(scheduler)
    with pytest.raises(RuntimeError, match="this plan is not the step in flight"):
        scheduler.fail(plan)
    commit(scheduler, second)
    assert scheduler.running(0).token_ids == [100, 101, TOKEN, TOKEN]


def test_a_discarded_step_is_planned_again() -> None:
    scheduler = make_scheduler()
    scheduler.discard()  # nothing is in flight, so nothing is discarded
    submit(scheduler, "a", 2)
    submit(scheduler, "b", 3)
    step(scheduler)
    plan = plan_of(scheduler)
    scheduler.discard()
    assert plan_of(scheduler) == plan


def test_slots_that_a_discarded_step_should_have_released_are_reported_again() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2, max_output=1)
    submit(scheduler, "b", 2)
    step(scheduler)
    assert plan_of(scheduler).released_slots == (0,)
    scheduler.discard()
    assert plan_of(scheduler).released_slots == (0,)


def test_a_plan_is_not_changed_by_later_events() -> None:
    scheduler = make_scheduler(block_size=2)
    submit(scheduler, "a", 2)
    plan = plan_of(scheduler)
    kept = pickle.dumps(plan)
    commit(scheduler, plan)
    step(scheduler)
    scheduler.abort("a")
    assert plan == pickle.loads(kept)


def test_a_plan_survives_pickling() -> None:
    scheduler = full_cache()
    plan = plan_of(scheduler)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.num_tokens == 2


def test_the_same_requests_give_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        scheduler = make_scheduler(num_blocks=6, block_size=2, max_num_seqs=3, max_num_batched_tokens=5)
        for length, name in enumerate("abcdef", 1):
            submit(scheduler, name, length, max_output=5, num_sequences=1 + length % 2)
        made = []
        for number in range(20):
            made.append(plan_of(scheduler))
            commit(scheduler, made[-1])
            if number == 7:
                scheduler.abort("c")
        assert scheduler.count.preemptions > 0
        return made

    assert plans() == plans()
