"""When blocks run out, the last admitted sequence releases its blocks, and every sequence finishes."""

from tests.scheduling.helpers import (
    TOKEN,
    commit,
    full_cache,
    make_scheduler,
    plan_of,
    run_to_the_end,
    spans_of,
    step,
    submit,
    waiting,
)


def test_a_single_sequence_may_fill_the_cache_and_its_last_token_needs_no_place() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    submit(scheduler, "a", 2, max_output=5)
    assert run_to_the_end(scheduler) == 5
    assert scheduler.count.preemptions == 0


def test_a_block_is_taken_for_its_first_token() -> None:
    scheduler = make_scheduler(block_size=4)
    submit(scheduler, "a", 3)
    tables = []
    for _ in range(3):
        plan = plan_of(scheduler)
        commit(scheduler, plan)
        tables.append([list(table) for table in plan.tables[0]])
    assert tables == [[[0]], [[0]], [[0, 1]]]


def test_when_blocks_run_out_the_last_admitted_sequence_releases_all_its_blocks() -> None:
    scheduler = full_cache()
    victim = scheduler.running(2)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 3, 4), (1, 3, 4)]
    assert plan.released_slots == (2,)
    assert (victim.slot, list(victim.block_tables[0]), victim.num_computed_tokens) == (None, [], 0)
    assert (victim.num_preemptions, scheduler.count.preemptions) == (1, 1)


def test_a_preempted_sequence_goes_to_the_head_of_the_queue() -> None:
    scheduler = full_cache()
    assert waiting(scheduler) == [3]
    plan_of(scheduler)
    assert waiting(scheduler) == [2, 3]


def test_a_step_that_preempts_admits_no_new_sequence() -> None:
    """The freed blocks belong to the sequences that needed them, even if there is room for a new one."""
    scheduler = make_scheduler(num_blocks=7)
    submit(scheduler, "a", 1)
    submit(scheduler, "b", 5)
    step(scheduler)
    submit(scheduler, "small", 1)
    assert scheduler.block_pool.num_available == 1
    assert step(scheduler) == [(0, 1, 2)]
    assert waiting(scheduler) == [1, 2]


def test_a_preempted_sequence_keeps_its_tokens_and_computes_them_again_in_one_span() -> None:
    scheduler = full_cache()
    step(scheduler)
    scheduler.abort("b")
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 4, 5), (2, 0, 4)]
    assert list(plan.spans[1].token_ids) == [100, 101, TOKEN, TOKEN]
    progress = scheduler.commit(plan, [[TOKEN], [8]])
    assert progress[1].new_token_ids == [8], "tokens handed out before are not handed out again"
    assert progress[1].sequence.token_ids == [100, 101, TOKEN, TOKEN, 8]


def test_preempted_sequences_return_in_their_order_of_arrival() -> None:
    scheduler = make_scheduler(num_blocks=6)
    submit(scheduler, "a", 2)
    submit(scheduler, "b", 2)
    submit(scheduler, "c", 2)
    scheduler.commit(plan_of(scheduler), [[7, 7, 7], [7], [7]])
    assert spans_of(plan_of(scheduler)) == [(0, 2, 5)], "three blocks for the oldest: two have to go"
    assert waiting(scheduler) == [1, 2]


def test_the_budget_of_a_preempted_sequence_goes_to_later_ones() -> None:
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=5)
    for name, prompt_len in [("a", 1), ("b", 1), ("c", 3)]:
        submit(scheduler, name, prompt_len)
    scheduler.commit(plan_of(scheduler), [[7, 7, 7], [7, 7], [7]])  # as if speculation had given a and b more
    assert spans_of(plan_of(scheduler)) == [(0, 1, 4), (1, 1, 3)], "c, a decode, was to have one of the five tokens"


def test_every_sequence_finishes_in_a_cache_of_any_size() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    for name in "abcdef":
        submit(scheduler, name, 3, max_output=6)
    run_to_the_end(scheduler, max_num_steps=6 * 9)  # the oldest sequence computes at least one token per step
    assert scheduler.count.preemptions > 0
