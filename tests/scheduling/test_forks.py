"""The sequences of one request (`n > 1`): their prompt is computed once and its blocks are shared, copied on write."""

from typing import Any

import pytest

from inflight.scheduling.scheduler import Scheduler
from tests.scheduling.helpers import (
    commit,
    make_scheduler,
    plan_of,
    spans_of,
    step,
    submit,
    tables_of,
    waiting,
)


def forking(num_blocks: int = 100, block_size: int = 4, **options: Any) -> Scheduler:
    """A scheduler without a prefix cache, so that only forks share blocks."""
    return make_scheduler(num_blocks, block_size, **options)


def num_tokens_to_the_end(scheduler: Scheduler) -> int:
    num_tokens = 0
    while scheduler.num_running + scheduler.num_waiting:
        plan = plan_of(scheduler)
        num_tokens += plan.num_tokens
        commit(scheduler, plan)
    return num_tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("budget", [100, 8, 3])
@pytest.mark.parametrize("max_output", [1, 2, 6])
def test_the_prompt_is_computed_once(prefix_caching: bool, prompt_len: int, budget: int, max_output: int) -> None:
    """Each other sequence computes only the last prompt token, which gives its first output token."""
    n = 3
    scheduler = forking(enable_prefix_caching=prefix_caching, max_num_batched_tokens=budget)
    submit(scheduler, "a", prompt_len, max_output, num_sequences=n)
    assert num_tokens_to_the_end(scheduler) == prompt_len + (n - 1) + n * (max_output - 1)
    assert scheduler.reuse.num_cached_tokens == (n - 1) * (prompt_len - 1)
    assert scheduler.block_pool.num_used == 0


def test_siblings_wait_for_the_first_then_share_its_full_blocks_and_copy_the_last() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, num_sequences=3)
    assert step(scheduler) == [(0, 0, 7)]
    assert scheduler.num_running == 3
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 7, 8), (1, 6, 7), (2, 6, 7)]
    assert tables_of(plan) == {0: [0, 1], 1: [0, 2], 2: [0, 3]}
    assert plan.copies == ((1, 2), (1, 3))
    commit(scheduler, plan)
    plan = plan_of(scheduler)
    assert plan.copies == (), "once"
    assert spans_of(plan) == [(0, 8, 9), (1, 7, 8), (2, 7, 8)]


def test_no_block_is_copied_if_the_last_token_begins_a_block() -> None:
    scheduler = forking()
    submit(scheduler, "a", 9, num_sequences=2)
    step(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 9, 10), (1, 8, 9)]
    assert tables_of(plan) == {0: [0, 1, 2], 1: [0, 1, 3]}
    assert plan.copies == ()


def test_a_prompt_that_fills_its_blocks_has_its_last_one_copied() -> None:
    """The last token is computed again, and a shared block must not be written to."""
    scheduler = forking()
    submit(scheduler, "a", 8, num_sequences=2)
    step(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 8, 9), (1, 7, 8)]
    assert tables_of(plan) == {0: [0, 1, 2], 1: [0, 3]}
    assert plan.copies == ((1, 3),)


def test_siblings_do_not_wait_for_a_prompt_of_one_token() -> None:
    scheduler = forking()
    submit(scheduler, "a", 1, num_sequences=3)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    assert plan.copies == ()


def test_a_chunked_prompt_is_forked_once_it_is_complete() -> None:
    scheduler = forking(max_num_batched_tokens=4)
    submit(scheduler, "a", 10, num_sequences=2)
    assert [step(scheduler) for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)]]
    assert step(scheduler) == [(0, 10, 11), (1, 9, 10)]


def test_a_sibling_admitted_late_is_forked_from_a_running_one() -> None:
    scheduler = forking(max_num_seqs=2)
    submit(scheduler, "other", 3, max_output=5)
    submit(scheduler, "a", 7, num_sequences=2)
    for _ in range(5):
        step(scheduler)
    assert waiting(scheduler) == [2]
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 11, 12), (2, 6, 7)]
    assert tables_of(plan)[2][:1] == tables_of(plan)[1][:1]
    assert plan.copies == ((tables_of(plan)[1][1], tables_of(plan)[2][1]),), "with what else is in that block by now"


def test_a_sibling_is_admitted_if_its_unshared_blocks_fit() -> None:
    scheduler = forking(num_blocks=8, max_num_seqs=2)
    submit(scheduler, "other", 3, max_output=2)
    submit(scheduler, "a", 18, max_output=3, num_sequences=2)
    step(scheduler)
    step(scheduler)
    plan = plan_of(scheduler)
    assert scheduler.block_pool.num_used == 6
    assert spans_of(plan) == [(1, 19, 20), (2, 17, 18)], "five blocks each, but four of them are the same"


def test_siblings_are_forked_from_one_that_ends_with_its_first_token() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, max_output=1, num_sequences=3)
    assert step(scheduler) == [(0, 0, 7)]
    assert scheduler.block_pool.num_used == 3, "a full block for two, and a copy for each"
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 6, 7), (2, 6, 7)]
    assert tables_of(plan) == {1: [0, 2], 2: [0, 3]}
    assert plan.copies == ((1, 2), (1, 3)), "the source is free, but nothing is written before all copies are made"


def test_siblings_are_forked_from_one_that_ends_with_a_stop_string() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, num_sequences=2)
    step(scheduler)
    scheduler.finish(0, "stop", 0)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 6, 7)]
    assert plan.copies == ((1, 2),)


def test_no_blocks_are_copied_for_siblings_that_are_aborted_before_they_run() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, max_output=1, num_sequences=3)
    step(scheduler)
    scheduler.finish(1, "abort")
    submit(scheduler, "b", 3)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(2, 6, 7), (3, 0, 3)]
    assert plan.copies == ((1, 3),)
    assert len({block for table in tables_of(plan).values() for block in table}) == 3


def test_if_the_first_sibling_ends_before_its_prompt_is_computed_the_next_takes_over() -> None:
    scheduler = forking(max_num_batched_tokens=4)
    submit(scheduler, "a", 7, num_sequences=3)
    step(scheduler)
    scheduler.finish(0, "abort")
    assert step(scheduler) == [(1, 0, 4)]
    assert step(scheduler) == [(1, 4, 7)]
    assert step(scheduler) == [(1, 7, 8), (2, 6, 7)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_that_waited_for_a_failed_step_continue_without_it(prefix_caching: bool) -> None:
    scheduler = forking(enable_prefix_caching=prefix_caching)
    submit(scheduler, "a", 7, num_sequences=3)
    assert [each.sequence_id for each in scheduler.fail(plan_of(scheduler))] == [0]
    assert step(scheduler) == [(1, 0, 7)]
    assert step(scheduler) == [(1, 7, 8), (2, 6, 7)]


def test_forks_of_a_discarded_step_are_repeated() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, num_sequences=3)
    step(scheduler)
    plan = plan_of(scheduler)
    scheduler.discard()
    assert scheduler.block_pool.num_used == 2
    again = plan_of(scheduler)
    assert spans_of(again) == spans_of(plan)
    assert len(again.copies) == 2
    assert scheduler.reuse.num_cached_tokens == 12, "counted once"


def test_forks_from_an_ended_sibling_are_lost_with_a_discarded_step_and_recomputed() -> None:
    scheduler = forking()
    submit(scheduler, "a", 7, max_output=1, num_sequences=3)
    step(scheduler)
    plan_of(scheduler)
    scheduler.discard()
    assert step(scheduler) == [(1, 0, 7)]
    assert step(scheduler) == [(2, 6, 7)]
    assert scheduler.block_pool.num_used == 0


def test_a_preempted_sibling_is_forked_again_and_computes_its_own_output() -> None:
    scheduler = forking(num_blocks=6)
    submit(scheduler, "other", 8)
    submit(scheduler, "a", 6, num_sequences=2)
    assert [step(scheduler) for _ in range(4)][1:] == [
        [(0, 8, 9), (1, 6, 7), (2, 5, 6)],
        [(0, 9, 10), (1, 7, 8), (2, 6, 7)],
        [(0, 10, 11), (1, 8, 9)],
    ]
    scheduler.abort("other")
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 9, 10), (2, 5, 8)]
    assert plan.copies == ((tables_of(plan)[1][1], tables_of(plan)[2][1]),)


def test_siblings_can_be_forked_from_one_that_owes_several_tokens_per_step() -> None:
    """Speculation would give several tokens per step."""
    for prefix_caching in (True, False):
        scheduler = forking(max_num_seqs=2, enable_prefix_caching=prefix_caching)
        submit(scheduler, "a", 6, num_sequences=2)
        scheduler.commit(plan_of(scheduler), [[7, 7, 7]])
        assert step(scheduler) == [(0, 6, 9), (1, 5, 6)]


def test_siblings_beyond_the_recompute_length_are_neither_forked_from_nor_waited_for() -> None:
    scheduler = forking(recompute_beyond=8, max_num_seqs=2)
    submit(scheduler, "other", 3, max_output=4)
    submit(scheduler, "a", 7, num_sequences=2)
    for _ in range(4):
        step(scheduler)
    assert scheduler.running(1).num_computed_tokens > 8
    assert step(scheduler) == [(1, 10, 11), (2, 0, 7)]


def test_siblings_that_have_all_outgrown_the_recompute_length_share_their_prompt_again() -> None:
    scheduler = forking(recompute_beyond=8)
    submit(scheduler, "a", 7, num_sequences=2)
    assert [step(scheduler) for _ in range(3)] == [[(0, 0, 7)], [(0, 7, 8), (1, 6, 7)], [(1, 7, 8), (0, 0, 9)]]
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 9, 10), (1, 6, 9)]
    assert len(plan.copies) == 1


def test_no_sibling_is_forked_from_one_that_ends_beyond_the_recompute_length() -> None:
    """The ended sequence has just outgrown the length, but its blocks were computed before that."""
    scheduler = forking(recompute_beyond=8)
    submit(scheduler, "a", 7, num_sequences=2, stop_token_ids=frozenset({9}))
    step(scheduler)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 7, 8), (1, 6, 7)]
    first, second = scheduler.commit(plan, [[7], [7, 9]])
    assert (first.sequence.num_computed_tokens, second.sequence.finish_reason) == (0, "stop")
    assert step(scheduler) == [(0, 0, 9)]


def test_a_block_is_copied_even_if_a_sequence_that_shared_it_is_preempted_in_the_same_step() -> None:
    """A fork that owes more than its last token fills its copied block. Another sequence shares that block in flight
    and finds no block for the rest of its own tokens."""
    scheduler = make_scheduler(6, 4, enable_prefix_caching=True)
    submit(scheduler, "a", [1] * 6, max_output=12, num_sequences=2)
    submit(scheduler, "b", [1], max_output=20)
    step(scheduler, token=1)
    first, second, other = scheduler.running(0), scheduler.running(1), scheduler.running(2)
    scheduler.reuse.start_over(other)
    second.token_ids += [2, 2, 2]
    other.token_ids += [*[1] * 4, *[2] * 14]
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 6, 7), (1, 5, 9)]
    assert plan.copies == ((first.block_tables[0][1], second.block_tables[0][1]),)
    assert other.num_preemptions == 1
