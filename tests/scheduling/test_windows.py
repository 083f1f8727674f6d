"""Window groups release blocks outside the window; a prefix is found if the part that later tokens see is cached."""

import pytest

from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup
from inflight.contracts.step.plan import NO_BLOCK, StepPlan
from inflight.scheduling.scheduler import Scheduler
from tests.scheduling.helpers import commit, make_scheduler, plan_of, run_to_the_end, spans_of, step, submit

WINDOW = CacheGroup(window=6)


def windowed(num_blocks: int = 100, **options: bool | int) -> Scheduler:
    """Blocks of two tokens, one group that keeps all tokens, and one that keeps six."""
    return make_scheduler(num_blocks, 2, cache_groups=(ALL_TOKENS, WINDOW), **options)  # type: ignore[arg-type]


def num_kept(plan: StepPlan) -> list[int]:
    """The number of blocks that the first span's sequence has in each group."""
    return [len(table) - table.count(NO_BLOCK) for (table, *_) in plan.tables]


def test_a_long_sequence_holds_only_the_blocks_of_its_window() -> None:
    scheduler = windowed()
    submit(scheduler, "a", 3, max_output=61)
    kept = []
    for _ in range(61):
        plan = plan_of(scheduler)
        kept.append(num_kept(plan))
        commit(scheduler, plan)
    assert kept[-1] == [32, 4]
    assert max(in_window for _, in_window in kept) == 4
    assert scheduler.block_pool.num_used == 0


def test_blocks_that_left_a_window_are_available_to_other_sequences() -> None:
    """Otherwise, two sequences of twelve blocks would not fit."""
    scheduler = windowed(num_blocks=34)
    for name in ("a", "b"):
        submit(scheduler, name, 4, max_output=20)
    assert run_to_the_end(scheduler) == 20
    assert scheduler.count.preemptions == 0


def test_a_chunked_prompt_is_admitted_if_it_would_not_fit_as_a_whole() -> None:
    scheduler = windowed(num_blocks=16, max_num_batched_tokens=4)
    submit(scheduler, "a", 20, max_output=1)
    spans = [step(scheduler) for _ in range(5)]
    assert [end for ((_, _, end),) in spans] == [4, 8, 12, 16, 20]
    assert scheduler.num_running == 0


def test_a_prefix_is_found_by_its_last_window() -> None:
    scheduler = windowed(enable_prefix_caching=True)
    submit(scheduler, "a", 21, max_output=8)
    run_to_the_end(scheduler)
    submit(scheduler, "b", 21, max_output=8)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(1, 20, 21)]
    assert num_kept(plan) == [11, 4]
    commit(scheduler, plan)
    run_to_the_end(scheduler)
    assert scheduler.reuse.num_cached_tokens == 20


@pytest.mark.parametrize(("group", "index", "found"), [(0, 6, 12), (1, 7, 14), (1, 5, 10), (1, 0, 16), (0, 0, 0)])
def test_a_prefix_is_not_found_if_a_visible_block_before_its_end_is_gone(group: int, index: int, found: int) -> None:
    """There are 16 tokens in 8 blocks. The window shows five tokens before the next one, so three blocks."""
    scheduler = windowed(enable_prefix_caching=True)
    submit(scheduler, "a", 17, max_output=1)
    plan = plan_of(scheduler)
    commit(scheduler, plan)
    scheduler.block_pool.forget(plan.tables[group][0][index])
    submit(scheduler, "b", 17, max_output=1)
    assert spans_of(plan_of(scheduler)) == [(1, found, 17)]


@pytest.mark.parametrize("prompt_len", range(7, 15))
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_prompt_is_computed_once_for_all_its_sequences(prompt_len: int, enable_prefix_caching: bool) -> None:
    """This holds for every position in a block at which the window begins."""
    scheduler = windowed(enable_prefix_caching=enable_prefix_caching)
    submit(scheduler, "a", prompt_len, num_sequences=3, max_output=9)
    assert step(scheduler) == [(0, 0, prompt_len)]
    again = [(number, prompt_len - 1, prompt_len) for number in (1, 2)]
    assert step(scheduler) == [(0, prompt_len, prompt_len + 1), *again]


def test_a_sequence_that_arrives_after_the_window_has_moved_computes_the_prompt_again() -> None:
    scheduler = windowed(max_num_seqs=2)
    submit(scheduler, "first", 3, max_output=6)
    submit(scheduler, "a", 9, num_sequences=2, max_output=20)
    for _ in range(6):
        step(scheduler)
    assert step(scheduler) == [(1, 14, 15), (2, 0, 9)]
