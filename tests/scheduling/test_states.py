"""Recurrent states: where checkpoints are made, what is found again, and which are evicted."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.step.cache_layout import CacheLayout
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.retention import Retention
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.scheduling.states import LEAST_DISTANCE, prompt_checkpoints
from tests.scheduling.helpers import TOKEN, commit, make_scheduler, plan_of, run_to_the_end, step, submit

BLOCK = 16


def scheduler_of(num_states: int = 100, **options: object) -> Scheduler:
    sizes = {"num_blocks": 10_000, "block_size": BLOCK, "max_num_batched_tokens": 2048}
    return make_scheduler(enable_prefix_caching=True, num_states=num_states, **(sizes | options))  # type: ignore[arg-type]


def prompt(length: int, number: int = 0) -> list[int]:
    """Tokens that differ from those of other numbers from the first on."""
    return [1000 * number + place % 997 + 10 for place in range(length)]


def run(scheduler: Scheduler, name: str, token_ids: Sequence[int], num_output: int = 1) -> int:
    """Run a request alone to its end; return how many tokens were computed."""
    submit(scheduler, name, token_ids, num_output)
    num_computed = 0
    while scheduler.num_running + scheduler.num_waiting:
        num_computed += sum(end - start for _, start, end in step(scheduler))
    return num_computed


@given(length=st.integers(1, 40_000), block_size=st.sampled_from([1, 4, 16]), share=st.floats(0, 1))
def test_what_two_prompts_share_is_mostly_found(length: int, block_size: int, share: float) -> None:
    """A prompt that shares a part computes no more of it than it does not share, or a few blocks."""
    checkpoints = prompt_checkpoints(length, block_size)
    assert len(checkpoints) <= 18
    num_shared = int(share * length)
    found = max((each for each in checkpoints if each <= num_shared), default=0)
    assert num_shared - found <= max(length - num_shared, LEAST_DISTANCE * block_size) + 2 * block_size


def test_turns_of_a_chat_compute_what_is_new() -> None:
    """Also where the next prompt drops the end of the last one, and thoughts of the answer."""
    scheduler, history = scheduler_of(), prompt(5000)
    assert run(scheduler, "0", history, 300) == 5299
    for turn in range(1, 10):
        history = [*history, *[TOKEN] * 300, *prompt(200, turn)]
        assert run(scheduler, str(turn), history, 300) <= 499 + BLOCK
    history = [*history[:-20], *prompt(400, 20)]
    assert run(scheduler, "an end is dropped", history, 300) <= 399 + 299 + LEAST_DISTANCE * BLOCK


def test_checkpoints_of_a_long_prompt_are_few() -> None:
    scheduler = scheduler_of()
    run(scheduler, "a", prompt(32_000), 100)
    states = scheduler.reuse.states
    assert states is not None
    assert len(states._node_of) <= 14
    assert run(scheduler, "again", prompt(32_000)) <= BLOCK


def test_a_checkpoint_is_made_where_prompts_part() -> None:
    scheduler, common = scheduler_of(), prompt(1600)
    run(scheduler, "a", [*common, *prompt(4000, 1)])
    assert run(scheduler, "b", [*common, *prompt(3000, 2)]) > 3000 + BLOCK
    assert run(scheduler, "c", [*common, *prompt(3000, 3)]) == 3000


def test_requests_that_arrive_together_share_a_prefix() -> None:
    """The first computes it and leaves a state where the others part; they wait one step."""
    scheduler = scheduler_of(max_num_batched_tokens=4096)
    for number in range(8):
        submit(scheduler, str(number), [*prompt(640), *prompt(50, number + 1)], 4)
    assert step(scheduler) == [(0, 0, 690)]
    assert step(scheduler)[1:] == [(number, 640, 690) for number in range(1, 8)]
    run_to_the_end(scheduler)


def test_sequences_of_one_request_continue_from_its_prompt() -> None:
    scheduler = scheduler_of()
    submit(scheduler, "a", prompt(1000), 4, num_sequences=4)
    assert step(scheduler) == [(0, 0, 1000)]
    assert step(scheduler)[1:] == [(number, 992, 1000) for number in (1, 2, 3)]
    assert plan_of(scheduler).copies == ()


def test_a_preempted_sequence_continues_from_its_last_block() -> None:
    scheduler = scheduler_of(max_num_seqs=1, max_num_batched_tokens=512, aging_steps=1000)
    submit(scheduler, "low", prompt(640), 300, priority=5)
    for _ in range(100):
        step(scheduler)
    submit(scheduler, "high", prompt(640, 1), 10, priority=0)
    while scheduler.find(1) is not None:
        step(scheduler)
    assert scheduler.count.preemptions == 1
    ((_, start, end),) = step(scheduler)
    assert 640 + 64 < start < end
    assert end - start <= BLOCK
    run_to_the_end(scheduler)


def test_no_more_sequences_run_than_have_states() -> None:
    scheduler = scheduler_of(num_states=5)
    for number in range(6):
        submit(scheduler, str(number), prompt(100, number), 50)
    assert len(step(scheduler)) == 2
    run_to_the_end(scheduler)


def test_without_a_prefix_cache_there_are_no_checkpoints() -> None:
    scheduler = make_scheduler(num_states=4, max_num_seqs=2)
    submit(scheduler, "a", 40)
    for _ in range(10):
        plan = plan_of(scheduler)
        assert [len(span.states) for span in plan.spans] == [1]
        commit(scheduler, plan)


@pytest.mark.parametrize("keeps", [True, False])
def test_checkpoints_of_sessions_are_evicted_last(keeps: bool) -> None:
    pool, now = BlockPool(4000, CacheLayout(BLOCK, max_span=2048)), [0.0]
    retention = Retention(pool, 1000, lambda: now[0]) if keeps else None
    if retention is not None:
        retention.observe_prefill(1, 1.0)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=2048)
    scheduler = Scheduler(pool, limits, retention=retention, num_states=24)
    history = prompt(1600)
    for _ in range(3):
        run(scheduler, "session", history, 16)
        history = [*history, *[TOKEN] * 16, 5, 6]
        now[0] += 1
    for number in range(1, 20):
        run(scheduler, str(number), prompt(320, number))
    assert (run(scheduler, "session", history, 16) < 100) == keeps
