"""The promises of plain scheduling without sharing, with one example each."""

import pytest

from inflight.contracts.step.plan import Span
from tests.scheduling.helpers import (
    TOKEN,
    commit,
    make_scheduler,
    plan_of,
    slots_of,
    spans_of,
    step,
    submit,
    waiting,
)

# ------------------------------------------------------------------------------------- one sequence


def test_a_prompt_is_computed_in_one_span_then_each_token_in_a_span_of_one() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    assert plan_of(scheduler).spans == (
        Span(sequence_id=0, slot=0, start=0, token_ids=[100, 101, 102], num_logit_rows=1, sequence_length=3),
    )
    scheduler.discard()
    assert [step(scheduler) for _ in range(3)] == [[(0, 0, 3)], [(0, 3, 4)], [(0, 4, 5)]]
    assert plan_of(scheduler).spans == (
        Span(sequence_id=0, slot=0, start=5, token_ids=[TOKEN], num_logit_rows=1, sequence_length=6),
    )


def test_a_committed_step_reports_which_sequence_got_which_tokens() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3, max_output=2)
    (first,) = commit(scheduler, plan_of(scheduler), token=8)
    assert (first.sequence.request.request_id, first.new_token_ids, first.sequence.finish_reason) == ("a", [8], None)
    (last,) = commit(scheduler, plan_of(scheduler), token=9)
    assert (last.sequence, last.new_token_ids, last.sequence.finish_reason) == (first.sequence, [9], "length")
    assert last.sequence.token_ids == [100, 101, 102, 8, 9]
    assert last.sequence.num_output_tokens == 2


def test_without_sequences_there_is_no_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.plan() is None
    submit(scheduler, "a", 3, max_output=1)
    step(scheduler)
    assert scheduler.plan() is None
    assert (scheduler.num_running, scheduler.num_waiting, list(scheduler.unfinished())) == (0, 0, [])
    assert scheduler.block_pool.num_available == 100


def test_a_stop_token_ends_a_sequence_and_is_part_of_it() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 1, stop_token_ids=frozenset({9}))
    step(scheduler)
    (progress,) = commit(scheduler, plan_of(scheduler), token=9)
    assert (progress.new_token_ids, progress.sequence.finish_reason) == ([9], "stop")
    assert progress.sequence.token_ids == [100, TOKEN, 9]


def test_a_stop_token_before_min_tokens_is_an_ordinary_token() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 1, stop_token_ids=frozenset({9}), min_output_tokens=3)
    assert [step(scheduler, token=9) for _ in range(3)] == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]
    assert scheduler.plan() is None


def test_a_stop_token_at_the_length_limit_counts_as_stop() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 1, max_output=1, stop_token_ids=frozenset({9}))
    (progress,) = commit(scheduler, plan_of(scheduler), token=9)
    assert progress.sequence.finish_reason == "stop"


@pytest.mark.parametrize(("sampled", "taken"), [([7, 7, 7, 7, 7], [7, 7, 7]), ([7, 9, 7], [7, 9]), ([7, 8], [7, 8])])
def test_tokens_sampled_after_the_end_of_a_sequence_are_dropped(sampled: list[int], taken: list[int]) -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2, max_output=3, stop_token_ids=frozenset({9}))
    (progress,) = scheduler.commit(plan_of(scheduler), [sampled])
    assert progress.new_token_ids == taken
    assert progress.sequence.token_ids == [100, 101, *taken]


def test_several_tokens_of_one_step_are_computed_together_in_the_next() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 2)
    scheduler.commit(plan_of(scheduler), [[7, 8, 9]])
    assert plan_of(scheduler).spans == (
        Span(sequence_id=0, slot=0, start=2, token_ids=[7, 8, 9], num_logit_rows=1, sequence_length=5),
    )


# ------------------------------------------------------------------------------------- many sequences


def test_prompts_and_decodes_are_computed_in_the_same_step() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    step(scheduler)
    submit(scheduler, "b", 5)
    submit(scheduler, "c", 2)
    assert step(scheduler) == [(0, 3, 4), (1, 0, 5), (2, 0, 2)]
    assert step(scheduler) == [(0, 4, 5), (1, 5, 6), (2, 2, 3)]


def test_the_slot_of_a_finished_sequence_is_reused_in_the_next_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    submit(scheduler, "a", 3, max_output=1)
    submit(scheduler, "b", 3)
    submit(scheduler, "c", 3)
    assert step(scheduler) == [(0, 0, 3), (1, 0, 3)]
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 3, 4), (2, 0, 3)]
    assert slots_of(plan) == {1: 1, 2: 0}
    assert plan.released_slots == (0,)


def test_a_released_slot_is_reported_once() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 1)
    submit(scheduler, "b", 1)
    assert plan_of(scheduler).released_slots == ()
    scheduler.discard()
    scheduler.abort("a")
    assert plan_of(scheduler).released_slots == (0,)
    scheduler.discard()
    step(scheduler)
    assert plan_of(scheduler).released_slots == ()


def test_a_running_sequence_keeps_its_slot_and_new_ones_take_the_lowest_free_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    for name in "abcd":
        submit(scheduler, name, 1)
    step(scheduler)
    scheduler.abort("c")
    scheduler.abort("a")
    submit(scheduler, "e", 1)
    assert slots_of(plan_of(scheduler)) == {1: 1, 3: 3, 4: 0}


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_only_the_last_wants_logits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    submit(scheduler, "a", 10)
    plans = []
    for _ in range(4):
        plans.append(plan_of(scheduler))
        commit(scheduler, plans[-1])
    assert [spans_of(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)], [(0, 10, 11)]]
    assert [plan.spans[0].num_logit_rows for plan in plans] == [0, 0, 1, 1]


def test_decodes_are_scheduled_before_the_chunks_of_a_long_prompt_in_the_same_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    submit(scheduler, "a", 1)
    submit(scheduler, "b", 1)
    step(scheduler)
    submit(scheduler, "long", 5)
    assert step(scheduler) == [(0, 1, 2), (1, 1, 2), (2, 0, 2)]
    assert step(scheduler) == [(0, 2, 3), (1, 2, 3), (2, 2, 4)]
    assert step(scheduler) == [(0, 3, 4), (1, 3, 4), (2, 4, 5)]


def test_a_decode_precedes_the_chunk_of_an_older_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    submit(scheduler, "old", 4)
    submit(scheduler, "young", 1)
    plan = plan_of(scheduler)
    scheduler.commit(plan, [[7, 7, 7, 7, 7, 7], [7]])  # as if speculation had given the old one six tokens
    assert step(scheduler) == [(1, 1, 2), (0, 4, 8)]


def test_a_step_has_no_more_tokens_than_the_budget_and_no_more_sequences_than_slots() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=5)
    for name in "abcd":
        submit(scheduler, name, 2)
    assert step(scheduler) == [(0, 0, 2), (1, 0, 2), (2, 0, 1)]
    assert step(scheduler) == [(0, 2, 3), (1, 2, 3), (2, 1, 2)], "two tokens of the budget are left, but no slot"


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    """Otherwise, some decode would have to wait, or the step would exceed the budget."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=4)
    submit(scheduler, "a", 3, num_sequences=7)
    for _ in range(5):
        assert plan_of(scheduler).num_tokens <= 4
        scheduler.discard()
        step(scheduler)
    assert scheduler.num_running == 4


def test_with_a_budget_of_one_token_one_sequence_runs_at_a_time() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1)
    submit(scheduler, "a", 2, max_output=2)
    submit(scheduler, "b", 1, max_output=1)
    assert [step(scheduler) for _ in range(4)] == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)], [(1, 0, 1)]]


def test_sequences_are_admitted_in_order_even_if_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=10)
    submit(scheduler, "a", 6, max_output=2)
    submit(scheduler, "big", 8, max_output=2)
    submit(scheduler, "small", 1)
    assert step(scheduler) == [(0, 0, 6)]
    assert step(scheduler) == [(0, 6, 7)]
    assert step(scheduler) == [(1, 0, 8), (2, 0, 1)]


def test_a_sequence_is_admitted_only_if_all_its_owed_tokens_fit() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=9)
    submit(scheduler, "a", 5, max_output=3)
    submit(scheduler, "b", 7, max_output=1)
    assert step(scheduler) == [(0, 0, 5)], "budget for a chunk, but the seven tokens would not fit beside it"


def test_a_request_with_several_sequences_gives_each_its_own_stream() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 1, max_output=2, num_sequences=3)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    progress = scheduler.commit(plan, [[7], [8], [9]])
    assert [(p.sequence.index, p.sequence.token_ids[1:]) for p in progress] == [(0, [7]), (1, [8]), (2, [9])]
    scheduler.finish(1, "stop")
    assert step(scheduler) == [(0, 1, 2), (2, 1, 2)]
    assert not scheduler.is_unfinished("a")


# ------------------------------------------------------------------------------------- prefills with decodes


def test_prefills_stay_within_their_limit_while_there_are_decodes() -> None:
    scheduler = make_scheduler(max_prefill_tokens_per_step=4)
    submit(scheduler, "a", 10)
    submit(scheduler, "b", 1)
    assert step(scheduler) == [(0, 0, 10), (1, 0, 1)], "no decode can be delayed"
    submit(scheduler, "c", 6)
    submit(scheduler, "d", 3)
    assert step(scheduler) == [(0, 10, 11), (1, 1, 2), (2, 0, 4)]
    assert step(scheduler) == [(0, 11, 12), (1, 2, 3), (2, 4, 6), (3, 0, 2)]
    assert step(scheduler) == [(0, 12, 13), (1, 3, 4), (2, 6, 7), (3, 2, 3)]


def test_the_token_of_a_preempted_decode_does_not_extend_the_prefill_limit() -> None:
    scheduler = make_scheduler(num_blocks=8, max_prefill_tokens_per_step=3)
    submit(scheduler, "long", 1)
    submit(scheduler, "too", 1)
    submit(scheduler, "decode", 1)
    submit(scheduler, "victim", 2)
    scheduler.commit(plan_of(scheduler), [[7] * 3, [7] * 2, [7], [7]])  # as if by speculation
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(2, 1, 2), (0, 1, 4)], "five blocks are held, of eight; the two prefills owe five tokens"
    assert waiting(scheduler) == [3]
