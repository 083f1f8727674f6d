"""A sequence that outgrows a length is computed again, because the model sees all of it differently from then on."""

from inflight.contracts.step.plan import Span
from tests.scheduling.helpers import (
    commit,
    make_scheduler,
    plan_of,
    step,
    submit,
)


def test_a_sequence_that_outgrows_the_length_is_recomputed_in_its_slot_and_blocks() -> None:
    scheduler = make_scheduler(recompute_beyond=4)
    submit(scheduler, "a", 3)
    assert [step(scheduler) for _ in range(2)] == [[(0, 0, 3)], [(0, 3, 4)]]
    plan = plan_of(scheduler)
    assert plan.spans == (
        Span(sequence_id=0, slot=0, start=0, token_ids=[100, 101, 102, 7, 7], num_logit_rows=1, sequence_length=5),
    )
    assert sorted(plan.tables[0][0]) == [0, 1, 2, 3, 4]
    commit(scheduler, plan)
    assert [step(scheduler) for _ in range(2)] == [[(0, 5, 6)], [(0, 6, 7)]], "once is enough"
    assert scheduler.count.preemptions == 0


def test_a_prompt_that_starts_beyond_the_length_is_computed_once() -> None:
    scheduler = make_scheduler(recompute_beyond=4)
    submit(scheduler, "a", 5)
    assert [step(scheduler) for _ in range(2)] == [[(0, 0, 5)], [(0, 5, 6)]]


def test_every_chunk_carries_the_length_of_its_whole_sequence() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    submit(scheduler, "a", 10)
    lengths = []
    for _ in range(4):
        plan = plan_of(scheduler)
        lengths.append(plan.spans[0].sequence_length)
        commit(scheduler, plan)
    assert lengths == [10, 10, 10, 11]


def test_decodes_do_not_wait_while_an_older_sequence_is_recomputed() -> None:
    scheduler = make_scheduler(recompute_beyond=4, max_num_batched_tokens=4)
    submit(scheduler, "a", 3)
    submit(scheduler, "b", 1)
    assert step(scheduler) == [(0, 0, 3), (1, 0, 1)]
    assert step(scheduler) == [(0, 3, 4), (1, 1, 2)]
    assert step(scheduler) == [(1, 2, 3), (0, 0, 3)]
    assert step(scheduler) == [(1, 3, 4), (0, 3, 5)]
