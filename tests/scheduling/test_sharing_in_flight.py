"""Requests that arrive together compute their common prefix once, in the same step, even if the computing request
ends."""

from typing import Any

import pytest

from inflight.scheduling.scheduler import Scheduler
from tests.scheduling.helpers import commit, make_scheduler, plan_of, spans_of, step, submit, tables_of, waiting

NUM_REQUESTS, PREFIX, SUFFIX, BLOCK_SIZE = 32, 512, 16, 16


def sharing(num_blocks: int = 100, block_size: int = 4, **options: Any) -> Scheduler:
    return make_scheduler(num_blocks, block_size, enable_prefix_caching=True, **options)


def submit_many(scheduler: Scheduler, prefix: int = PREFIX) -> None:
    """Requests with a common prefix and individual suffixes."""
    for number in range(NUM_REQUESTS):
        submit(scheduler, f"{number}", [*range(prefix), *[1000 + number] * SUFFIX], max_output=2)


def num_prompt_tokens_computed(scheduler: Scheduler) -> int:
    """Run to the end, and return how many prompt tokens the steps computed."""
    num_computed = 0
    while scheduler.num_running + scheduler.num_waiting:
        plan = plan_of(scheduler)
        for span in plan.spans:
            num_prompt = scheduler.running(span.sequence_id).num_prompt_tokens
            num_computed += max(0, min(span.end, num_prompt) - span.start)
        commit(scheduler, plan)
    return num_computed


@pytest.mark.parametrize("budget", [PREFIX + NUM_REQUESTS * SUFFIX, 2048, 300, 64])
@pytest.mark.parametrize("max_num_seqs", [NUM_REQUESTS, 5])
def test_32_requests_with_a_common_prefix_compute_it_once(budget: int, max_num_seqs: int) -> None:
    scheduler = sharing(1000, BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    submit_many(scheduler)
    assert num_prompt_tokens_computed(scheduler) == PREFIX + NUM_REQUESTS * SUFFIX


def test_a_common_prefix_is_shared_within_one_step_if_the_budget_allows() -> None:
    scheduler = sharing(
        1000, BLOCK_SIZE, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=PREFIX + NUM_REQUESTS * SUFFIX
    )
    submit_many(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan)[:3] == [(0, 0, PREFIX + SUFFIX), (1, PREFIX, PREFIX + SUFFIX), (2, PREFIX, PREFIX + SUFFIX)]
    assert len(plan.spans) == NUM_REQUESTS
    tables = tables_of(plan)
    assert {tuple(table[: PREFIX // BLOCK_SIZE]) for table in tables.values()} == {tuple(range(PREFIX // BLOCK_SIZE))}
    assert len({table[-1] for table in tables.values()}) == NUM_REQUESTS


def test_a_prefix_that_ends_inside_a_block_is_shared_up_to_that_block() -> None:
    scheduler = sharing(1000, BLOCK_SIZE, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=4096)
    submit_many(scheduler, prefix=PREFIX + 5)
    assert num_prompt_tokens_computed(scheduler) == PREFIX + NUM_REQUESTS * (5 + SUFFIX)


def common(scheduler: Scheduler) -> None:
    """Three requests with three common blocks and one token of their own, so four blocks each."""
    for number in range(3):
        submit(scheduler, f"{number}", [*range(12), 50 + number])


@pytest.mark.parametrize("how", ["between steps", "in flight"])
def test_when_the_leader_is_aborted_midway_another_takes_over(how: str) -> None:
    scheduler = sharing(max_num_batched_tokens=6)
    common(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 6)]
    if how == "in flight":
        scheduler.abort("0")
    commit(scheduler, plan)
    scheduler.abort("0")
    assert step(scheduler) == [(1, 4, 10)], "the one block that was finished is kept"
    assert step(scheduler) == [(1, 10, 13), (2, 12, 13)]


def test_followers_keep_a_prefix_whose_leader_is_aborted_in_the_step_that_computes_it() -> None:
    scheduler = sharing()
    common(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 13), (1, 12, 13), (2, 12, 13)]
    scheduler.abort("0")
    commit(scheduler, plan)
    assert step(scheduler) == [(1, 13, 14), (2, 13, 14)]


def test_when_the_leader_is_preempted_midway_another_takes_over() -> None:
    """A better request takes the leader's slot; then another request with the same prefix continues where the leader
    was."""
    scheduler = sharing(max_num_batched_tokens=6, max_num_seqs=1, aging_steps=100)
    submit(scheduler, "leader", [*range(12), 50], priority=5)
    assert step(scheduler) == [(0, 0, 6)]
    submit(scheduler, "follower", [*range(12), 51], max_output=1, priority=3)
    assert step(scheduler) == [(1, 4, 10)]
    assert waiting(scheduler) == [0]
    assert step(scheduler) == [(1, 10, 13)]
    assert step(scheduler) == [(0, 12, 13)], "and the leader follows"


def test_the_prefix_of_the_leader_remains_if_blocks_run_out_before_a_follower_is_served() -> None:
    scheduler = sharing(num_blocks=5)
    common(scheduler)
    assert step(scheduler) == [(0, 0, 13), (1, 12, 13)], "three blocks and one each"
    for length in (14, 15):
        assert step(scheduler) == [(0, length - 1, length), (1, length - 1, length)]
    assert step(scheduler) == [(0, 15, 16), (1, 15, 16)]
    assert step(scheduler) == [(0, 16, 17)]
    assert waiting(scheduler) == [1, 2]
    scheduler.abort("0")
    assert step(scheduler) == [(1, 12, 17)]


def test_blocks_of_a_failed_step_are_not_found() -> None:
    scheduler = sharing()
    submit(scheduler, "a", [*range(12), 50])
    assert scheduler.fail(plan_of(scheduler)) != []
    assert scheduler.block_pool.num_cached == 0
    submit(scheduler, "b", [*range(12), 51])
    assert step(scheduler) == [(1, 0, 13)]


def test_a_failed_step_keeps_what_earlier_steps_computed() -> None:
    scheduler = sharing(max_num_batched_tokens=9)
    submit(scheduler, "a", [*range(12), 50])
    assert step(scheduler) == [(0, 0, 9)]
    scheduler.fail(plan_of(scheduler))
    submit(scheduler, "b", [*range(12), 51])
    assert step(scheduler) == [(1, 8, 13)]


def test_a_sequence_that_relied_on_a_discarded_step_starts_over() -> None:
    scheduler = sharing()
    common(scheduler)
    plan = plan_of(scheduler)
    scheduler.discard()
    assert scheduler.block_pool.num_cached == 0
    assert [sequence.num_computed_tokens for sequence in scheduler.unfinished()] == [0, 0, 0]
    again = plan_of(scheduler)
    assert spans_of(again) == spans_of(plan)
    progress = commit(scheduler, again)
    assert [each.sequence.num_cached_tokens for each in progress] == [0, 12, 12], "counted once"
    assert (scheduler.count.prompt_tokens, scheduler.reuse.num_cached_tokens) == (39, 24)


def test_a_sequence_outside_a_failed_step_that_relied_on_it_starts_over() -> None:
    """The budget is used up, so a running sequence shares a block in flight and gets no token."""
    scheduler = sharing(max_num_batched_tokens=9, recompute_beyond=8)
    submit(scheduler, "a", [1] * 8)
    submit(scheduler, "b", [1])
    plan = plan_of(scheduler)
    scheduler.commit(plan, [[1], [1] * 8])  # both have to be recomputed: nine tokens each
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 9)]
    follower = scheduler.running(1)
    assert follower.num_computed_tokens == 8
    assert [each.sequence_id for each in scheduler.fail(plan)] == [0]
    assert (follower.num_computed_tokens, list(follower.block_tables[0])) == (0, [])
    assert step(scheduler) == [(1, 0, 9)]


def test_a_discarded_step_does_not_change_decodes() -> None:
    scheduler = sharing()
    submit(scheduler, "a", [*range(12), 50])
    step(scheduler)
    tables = tables_of(plan_of(scheduler))
    scheduler.discard()
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 13, 14)]
    assert tables_of(plan) == tables


def test_requests_with_different_salts_share_nothing_in_flight() -> None:
    scheduler = sharing()
    for salt in (None, "a", "b", "a"):
        submit(scheduler, f"{salt} {scheduler.num_waiting}", [*range(12), 50], cache_salt=salt)
    assert step(scheduler) == [(0, 0, 13), (1, 0, 13), (2, 0, 13), (3, 12, 13)]


def test_a_block_that_a_decode_is_about_to_fill_is_not_shared() -> None:
    scheduler = sharing()
    submit(scheduler, "a", [1, 1, 1])
    step(scheduler, token=1)
    submit(scheduler, "b", [1] * 6)
    assert step(scheduler, token=1) == [(0, 3, 4), (1, 0, 6)]
