"""Lower priority values run first, equal ones in order of arrival, and waiting sequences age."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.scheduling import sequences
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request, Sequence
from inflight.scheduling.sequences import ServiceOrder, WaitingQueue
from tests.scheduling.helpers import make_scheduler, plan_of, slots_of, spans_of, step, submit, waiting


def by_priority(aging_steps: int = 1000, **options: Any) -> Scheduler:
    return make_scheduler(aging_steps=aging_steps, **options)


def new_sequence(sequence_id: int, priority: int, arrival: int) -> Sequence:
    return Sequence(sequence_id, Request("", [1], 2, priority=priority), 0, [1], arrival, ())


# ------------------------------------------------------------------------------------- the queue


@pytest.mark.parametrize(
    ("waited", "effective"), [(0, 3), (1, 3), (9, 3), (10, 2), (19, 2), (20, 1), (30, 0), (40, -1), (49, -1)]
)
def test_effective_priority_is_priority_minus_floor_of_steps_waited_by_aging_steps(waited: int, effective: int) -> None:
    for arrival in (0, 7, 13):
        sequence = new_sequence(0, 3, arrival)
        assert ServiceOrder(10).effective_priority(sequence, arrival + waited) == effective
        assert ServiceOrder(None).effective_priority(sequence, arrival + waited) == 0


actions = st.lists(
    st.tuples(st.sampled_from(["come", "come", "leave", "return", "leave best", "wait"]), st.integers(-3, 3)),
    max_size=80,
)


@given(st.none() | st.integers(1, 7), actions, st.booleans())
def test_the_best_sequence_is_the_best_by_the_formula(
    aging_steps: int | None, actions: list[tuple[str, int]], seldom_tidied: bool
) -> None:
    most_stale, sequences.MAX_STALE = sequences.MAX_STALE, 64 if seldom_tidied else 1
    try:
        queue, rng, now = WaitingQueue(ServiceOrder(aging_steps)), random.Random(0), 0
        here: list[Sequence] = []
        gone: list[Sequence] = []

        def order(sequence: Sequence) -> tuple[int, int]:
            if aging_steps is None:
                return 0, sequence.sequence_id
            return sequence.request.priority - (now - sequence.arrival) // aging_steps, sequence.sequence_id

        for action, number in actions:
            if action == "come":
                here.append(new_sequence(len(here) + len(gone), number, now))
                queue.push(here[-1])
            elif action == "leave" and here:
                gone.append(here.pop(rng.randrange(len(here))))
                queue.remove(gone[-1])
            elif action == "leave best" and here:
                gone.append(min(here, key=order))
                here.remove(gone[-1])
                queue.remove(gone[-1])
            elif action == "return" and gone:
                here.append(gone.pop(rng.randrange(len(gone))))
                queue.push(here[-1])
            elif action == "wait":
                now += abs(number)
            assert queue.best(now) is min(here, key=order, default=None)
            assert len(queue) == len(here)
            assert {each.sequence_id for each in queue} == {each.sequence_id for each in here}
            assert all(queue.get(each.sequence_id) is each for each in here)
            assert all(queue.get(each.sequence_id) is None for each in gone)
            assert queue._num_entries == sum(map(len, queue._heaps.values()))
            assert queue._num_entries <= 2 * len(here) + sequences.MAX_STALE + 1
    finally:
        sequences.MAX_STALE = most_stale


def test_the_queue_drops_the_entries_of_sequences_that_have_left() -> None:
    queue = WaitingQueue(ServiceOrder(10))
    for number in range(10_000):
        sequence = new_sequence(number, number % 5, number // 100)
        queue.push(sequence)
        if number != 7_777:
            queue.remove(sequence)
    assert queue._num_entries < 100
    assert queue.best(100) is queue.get(7_777)


# ------------------------------------------------------------------------------------- admission


def test_lower_priority_values_come_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = by_priority(max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 0), ("c", 1), ("d", 0)]:
        submit(scheduler, name, 1, max_output=1, priority=priority)
    assert [step(scheduler) for _ in range(4)] == [[(1, 0, 1)], [(3, 0, 1)], [(2, 0, 1)], [(0, 0, 1)]]


def test_without_the_policy_priorities_are_ignored() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 0)]:
        submit(scheduler, name, 1, max_output=1, priority=priority)
    assert [step(scheduler) for _ in range(2)] == [[(0, 0, 1)], [(1, 0, 1)]]


def test_prefills_share_the_budget_by_priority() -> None:
    scheduler = by_priority(max_num_batched_tokens=6)
    submit(scheduler, "a", 8, priority=1)
    step(scheduler)
    submit(scheduler, "b", 8, priority=0)
    assert step(scheduler) == [(0, 6, 8), (1, 0, 4)], "those who run go before those who wait"
    submit(scheduler, "c", 8, priority=-1)
    assert step(scheduler) == [(0, 8, 9), (1, 4, 8), (2, 0, 1)]
    submit(scheduler, "d", 8, priority=0)
    assert step(scheduler) == [(1, 8, 9), (0, 9, 10), (2, 1, 5)], "decodes first, the better one before the other"


def test_a_sequence_that_waited_long_enough_precedes_one_with_a_better_priority() -> None:
    scheduler = by_priority(aging_steps=3, max_num_seqs=1)
    submit(scheduler, "runs", 1, max_output=6, priority=-10)
    step(scheduler)
    submit(scheduler, "old", 1, max_output=1, priority=1)
    for _ in range(3):
        step(scheduler)
    submit(scheduler, "better", 1, max_output=1, priority=0)
    assert [step(scheduler) for _ in range(4)] == [[(0, 4, 5)], [(0, 5, 6)], [(1, 0, 1)], [(2, 0, 1)]]


# ------------------------------------------------------------------------------------- preemption


def test_the_worst_sequence_gives_up_its_slot_for_a_better_one() -> None:
    scheduler = by_priority(max_num_seqs=2)
    submit(scheduler, "a", 2, priority=1)
    submit(scheduler, "b", 2, priority=2)
    step(scheduler)
    submit(scheduler, "c", 2, priority=0)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 2, 3), (2, 0, 2)]
    assert plan.released_slots == (1,)
    assert slots_of(plan) == {0: 0, 2: 1}
    assert waiting(scheduler) == [1]


def test_the_worst_sequences_give_up_as_many_blocks_as_a_better_one_needs() -> None:
    scheduler = by_priority(num_blocks=10)
    for name, priority in [("a", 0), ("b", 2), ("c", 3)]:
        submit(scheduler, name, 3, priority=priority)
    step(scheduler)
    submit(scheduler, "d", 4, priority=1)
    assert step(scheduler) == [(0, 3, 4), (1, 3, 4)], "c alone had enough, but those that run take two of it at once"
    assert waiting(scheduler) == [3, 2]
    assert step(scheduler) == [(0, 4, 5), (3, 0, 4)]
    assert waiting(scheduler) == [1, 2]


def test_no_sequence_is_preempted_if_that_does_not_help() -> None:
    scheduler = by_priority(num_blocks=12)
    submit(scheduler, "a", 8, max_output=2, priority=0)
    submit(scheduler, "b", 1, priority=2)
    step(scheduler)
    submit(scheduler, "c", 9, max_output=2, priority=1)
    assert step(scheduler) == [(0, 8, 9), (1, 1, 2)], "three blocks are available, b could give one, c needs nine"


def test_no_sequence_is_preempted_for_blocks_that_can_be_shared() -> None:
    scheduler = by_priority(num_blocks=11, enable_prefix_caching=True)
    submit(scheduler, "a", 6, priority=0)
    submit(scheduler, "b", [1, 2], priority=2)
    step(scheduler)
    submit(scheduler, "c", 7, priority=1)
    assert step(scheduler) == [(0, 6, 7), (1, 2, 3), (2, 6, 7)], "c needs one block, of the three that are available"


def test_blocks_that_a_victim_shares_are_not_counted_as_freed() -> None:
    scheduler = by_priority(num_blocks=10, enable_prefix_caching=True)
    submit(scheduler, "a", 6, max_output=2, priority=0)
    submit(scheduler, "b", [*range(100, 106), 50], priority=2)
    step(scheduler)
    assert scheduler.block_pool.num_used == 7
    submit(scheduler, "c", [*range(50, 56)], priority=1)
    assert step(scheduler) == [(0, 6, 7), (1, 7, 8)], "one or two come free if b goes, and six are needed"
    assert scheduler.count.preemptions == 0


def test_equal_priorities_never_preempt_each_other() -> None:
    scheduler = by_priority(aging_steps=2, max_num_seqs=1)
    submit(scheduler, "a", 1, max_output=40)
    submit(scheduler, "b", 1, max_output=40)
    for start in range(40):
        assert step(scheduler) == [(0, start, start + 1)]
    assert step(scheduler) == [(1, 0, 1)]


def test_a_sequence_aged_to_the_top_is_not_preempted_by_a_later_arrival() -> None:
    scheduler = by_priority(aging_steps=3, max_num_seqs=1)
    submit(scheduler, "better", 1, max_output=6, priority=0)
    submit(scheduler, "aged", 1, max_output=100, priority=2)
    for _ in range(6):
        step(scheduler)
    assert scheduler.num_running == 0
    for number in range(20):
        submit(scheduler, f"later {number}", 1, max_output=1, priority=0)
        assert step(scheduler) == [(1, number, number + 1)]
    submit(scheduler, "much better", 1, max_output=1, priority=-10)
    assert step(scheduler) == [(22, 0, 1)]


def test_a_preempted_sequence_keeps_its_age() -> None:
    scheduler = by_priority(aging_steps=10, max_num_seqs=1)
    submit(scheduler, "old", 1, max_output=30, priority=1)
    for _ in range(8):
        step(scheduler)
    submit(scheduler, "better", 1, max_output=5, priority=0)
    assert step(scheduler) == [(1, 0, 1)]
    submit(scheduler, "as good, but later", 1, max_output=5, priority=1)
    submit(scheduler, "better, but later", 1, max_output=5, priority=0)
    for _ in range(4):
        step(scheduler)
    assert step(scheduler) == [(0, 0, 9)], "more than ten steps old, so as good as the better one, and here before it"


def test_a_preempted_sequence_loses_no_reported_token() -> None:
    scheduler = by_priority(max_num_seqs=1)
    submit(scheduler, "a", 2, max_output=5, priority=1)
    sequence = next(scheduler.unfinished())
    step(scheduler, token=7)
    step(scheduler, token=8)
    submit(scheduler, "b", 1, max_output=1, priority=0)
    step(scheduler)
    assert sequence.token_ids == [100, 101, 7, 8]
    plan = plan_of(scheduler)
    assert list(plan.spans[0].token_ids) == [100, 101, 7, 8]
    (progress,) = scheduler.commit(plan, [[9]])
    assert progress.new_token_ids == [9]
    assert sequence.token_ids == [100, 101, 7, 8, 9]


def test_when_blocks_run_out_the_worst_sequence_is_preempted_not_the_last_to_arrive() -> None:
    scheduler = by_priority(num_blocks=4)
    submit(scheduler, "a", 2, priority=1)
    submit(scheduler, "b", 2, priority=0)
    step(scheduler)
    assert step(scheduler) == [(1, 2, 3)]
    assert waiting(scheduler) == [0]


def test_the_queue_is_listed_in_its_order_of_service() -> None:
    scheduler = by_priority(max_num_seqs=2)
    for name, priority in [("a", 3), ("b", 1), ("c", 2), ("d", 1), ("e", 0)]:
        submit(scheduler, name, 1, priority=priority)
    step(scheduler)
    assert [each.sequence_id for each in scheduler.unfinished()] == [4, 1, 3, 2, 0]
