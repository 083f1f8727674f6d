"""A computed prefix is found again by its exact content until its blocks are needed."""

from typing import Any

import pytest

from inflight.contracts.step.cache_layout import CacheLayout
from inflight.contracts.step.plan import NO_BLOCK
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Key, Parent, PrefixCache, PrefixNode, Root, make_key
from inflight.scheduling.scheduler import Scheduler
from tests.scheduling.helpers import (
    TOKEN,
    commit,
    make_scheduler,
    plan_of,
    run_to_the_end,
    spans_of,
    step,
    submit,
    tables_of,
)


def caching(num_blocks: int = 100, block_size: int = 4, **options: Any) -> Scheduler:
    return make_scheduler(num_blocks, block_size, enable_prefix_caching=True, **options)


def compute(scheduler: Scheduler, request_id: str, prompt: list[int], **options: Any) -> int:
    """Run a request alone to its first token, which is also its last, and return how many tokens it computed."""
    submit(scheduler, request_id, prompt, max_output=1, **options)
    ((_, start, end),) = step(scheduler)
    assert end == len(prompt)
    assert scheduler.num_running == 0
    return end - start


# ------------------------------------------------------------------------------------- keys


def test_keys_are_exact() -> None:
    assert make_key(Root(), [1, 2]) == make_key(Root(), (1, 2))
    different = [
        make_key(Root(), [1, 2]),
        make_key(Root(), [2, 1]),
        make_key(Root(), [1, 2, 0]),
        make_key(Root(), [258]),  # these would have the same bytes if the widths of integers varied
        make_key(Root("salt"), [1, 2]),
        make_key(Root(""), [1, 2]),
        make_key(Root(is_long=True), [1, 2]),
        make_key(PrefixNode(make_key(Root(), [1]), []), [1, 2]),
        make_key(PrefixNode(make_key(Root(), [1]), []), [1, 2]),
    ]
    assert len(set(different)) == len(different)


def test_a_forgotten_node_differs_from_its_successor_with_the_same_key() -> None:
    cache = PrefixCache()
    first = known(cache, make_key(Root(), [1]), 5)
    cache.forget(5)
    assert cache.find(make_key(Root(), [1])) is None
    second = known(cache, make_key(Root(), [1]), 5)
    assert (first.key, second.blocks) == (second.key, [5])
    assert make_key(first, [2]) != make_key(second, [2])
    assert cache.node_of(5) is second
    assert len(cache) == 1


def known(cache: PrefixCache, key: Key, *blocks: int) -> PrefixNode:
    node = cache.add(key)
    for group, block in enumerate(blocks):
        cache.put(node, group, block)
    return node


def test_a_node_is_known_while_any_of_its_blocks_or_descendants_is_known() -> None:
    cache = PrefixCache(2)
    parent = known(cache, make_key(Root(), [1]), 0, 1)
    child = known(cache, make_key(parent, [2]), 2, 3)
    cache.forget(0)
    assert parent.blocks == [NO_BLOCK, 1]
    cache.forget(1)
    assert cache.find(parent.key) is parent
    cache.forget(2)
    assert (len(cache), cache.node_of(3)) == (2, child)
    cache.forget(3)
    assert len(cache) == 0
    assert all(cache.find(node.key) is None for node in (parent, child))


def test_a_child_of_a_forgotten_parent_is_not_found_under_a_new_one() -> None:
    cache = PrefixCache()
    parent = known(cache, make_key(Root(), [1]), 0)
    cache.forget(0)
    known(cache, make_key(parent, [2]), 1)
    again = known(cache, make_key(Root(), [1]), 0)
    assert cache.find(make_key(again, [2])) is None
    cache.forget(1)
    assert cache.find(make_key(Root(), [1])) is again


def test_a_child_is_not_found_under_another_parent_in_the_same_block() -> None:
    pool = BlockPool(2, CacheLayout(2))
    parent_tables, child_tables = pool.new_tables(), pool.new_tables()
    assert pool.grow(parent_tables, 2)
    assert pool.grow(child_tables, 2)
    parent = pool.add(make_key(Root(), [1, 2]))
    pool.remember(parent, 0, parent_tables[0][0])
    child = pool.add(make_key(parent, [3, 4]))
    pool.remember(child, 0, child_tables[0][0])
    pool.release(parent_tables)
    assert pool.grow(parent_tables, 2), "the parent's block is the only one to be had: it is evicted"
    assert parent.blocks == [NO_BLOCK]
    other = pool.add(make_key(Root(), [8, 9]))
    pool.remember(other, 0, parent_tables[0][0])
    assert pool.find(make_key(other, [3, 4])) is None
    pool.forget(parent_tables[0][0])
    assert pool.find(make_key(Root(), [1, 2])) is parent
    pool.remember(parent, 0, parent_tables[0][0])
    assert pool.find(make_key(parent, [3, 4])) is child, "it is the same prefix again"


@pytest.mark.parametrize("gone", ["evicted", "freed"])
def test_a_child_is_computed_again_after_its_parent_was_evicted(gone: str) -> None:
    scheduler = caching(num_blocks=3)
    compute(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    if gone == "evicted":
        compute(scheduler, "b", [9] * 12)
    else:
        for block in range(3):
            if scheduler.block_pool.node_of(block) is not None:
                scheduler.block_pool.forget(block)
        assert scheduler.block_pool.num_cached == 0
    compute(scheduler, "c", [1, 2, 0, 4])
    assert compute(scheduler, "d", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 9


# ------------------------------------------------------------------------------------- what is found


def test_a_request_finds_the_full_blocks_of_a_finished_request() -> None:
    scheduler = caching()
    assert compute(scheduler, "a", list(range(10))) == 10
    assert compute(scheduler, "b", [*range(10), 10, 11]) == 4, "two blocks of four; the half third is not found"
    assert compute(scheduler, "c", [*range(8), 99, 99, 99, 99, 99]) == 5


def test_blocks_after_a_different_prefix_are_not_found() -> None:
    scheduler = caching()
    compute(scheduler, "a", [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert compute(scheduler, "b", [2, 2, 2, 2, 3]) == 5
    assert compute(scheduler, "c", [1, 1, 1, 0, 2, 2, 2, 2, 3]) == 9


@pytest.mark.parametrize(("length", "num_computed"), [(7, 3), (8, 4), (9, 1), (12, 4), (13, 1)])
def test_the_last_token_is_always_computed(length: int, num_computed: int) -> None:
    scheduler = caching()
    compute(scheduler, "a", [5] * 16)
    assert compute(scheduler, "b", [5] * length) == num_computed


def test_a_request_reports_how_much_of_its_prompt_was_found() -> None:
    scheduler = caching()
    submit(scheduler, "a", 10)
    plan = plan_of(scheduler)
    commit(scheduler, plan)
    submit(scheduler, "b", 10, max_output=2)
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 10, 11), (1, 8, 10)]
    assert tables_of(plan)[0][:2] == tables_of(plan)[1][:2]
    progress = commit(scheduler, plan)
    assert [each.sequence.num_cached_tokens for each in progress] == [0, 8]
    assert (scheduler.count.prompt_tokens, scheduler.reuse.num_cached_tokens) == (20, 8)


def test_the_next_turn_of_a_conversation_finds_the_previous_output() -> None:
    scheduler = caching()
    submit(scheduler, "a", [1, 2, 3], max_output=10)
    run_to_the_end(scheduler)
    turn = [1, 2, 3, *[TOKEN] * 10]
    assert compute(scheduler, "b", [*turn, 50, 51, 52]) == len(turn) + 3 - 12, "the last token was never computed"


def test_requests_with_another_salt_find_nothing() -> None:
    scheduler = caching()
    prompt = [5] * 9
    assert compute(scheduler, "a", prompt) == 9
    assert compute(scheduler, "b", prompt, cache_salt="tenant") == 9
    assert compute(scheduler, "c", prompt, cache_salt="other tenant") == 9
    assert compute(scheduler, "d", prompt, cache_salt="tenant") == 1
    assert compute(scheduler, "e", prompt) == 1


def test_blocks_of_longer_sequences_are_not_found_by_short_ones_if_the_length_matters() -> None:
    scheduler = caching(recompute_beyond=10)
    assert compute(scheduler, "short", [5] * 9) == 9
    assert compute(scheduler, "long", [5] * 11) == 11
    assert compute(scheduler, "short again", [5] * 10) == 2
    assert compute(scheduler, "long again", [5] * 12) == 4


def test_a_sequence_that_outgrows_the_length_finds_blocks_of_long_sequences() -> None:
    scheduler = caching(recompute_beyond=10)
    compute(scheduler, "long", [5] * 16)
    submit(scheduler, "a", [5] * 10)
    assert step(scheduler, token=5) == [(1, 0, 10)]
    assert step(scheduler, token=5) == [(1, 8, 11)]


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = caching(num_blocks=6)
    submit(scheduler, "a", [1] * 11)
    submit(scheduler, "b", [2] * 9)
    assert step(scheduler) == [(0, 0, 11), (1, 0, 9)]
    assert step(scheduler) == [(0, 11, 12), (1, 9, 10)]
    assert step(scheduler) == [(0, 12, 13)], "b gave its three blocks back, of which a took the one with one token"
    scheduler.abort("a")
    assert step(scheduler) == [(1, 8, 11)]
    assert scheduler.reuse.num_cached_tokens == 0, "a prompt is counted when it first runs"


def test_without_a_prefix_cache_nothing_is_found() -> None:
    scheduler = caching()
    scheduler.reuse.enable_prefix_caching = False
    assert [compute(scheduler, name, [5] * 9) for name in "ab"] == [9, 9]
    assert scheduler.block_pool.num_cached == 0


def test_two_sequences_that_computed_the_same_tokens_end_up_with_one_block() -> None:
    scheduler = caching(block_size=2)
    submit(scheduler, "a", [1])
    submit(scheduler, "b", [1])
    plan = plan_of(scheduler)
    assert spans_of(plan) == [(0, 0, 1), (1, 0, 1)]
    commit(scheduler, plan)
    plan = plan_of(scheduler)
    assert tables_of(plan) == {0: [0], 1: [1]}
    commit(scheduler, plan)
    assert tables_of(plan_of(scheduler)) == {0: [0, 1], 1: [0, 2]}, "b gave its own up; it was taken by a at once"
    assert scheduler.block_pool.num_used == 3


# ------------------------------------------------------------------------------------- what is evicted


def test_the_least_recently_used_is_evicted_first() -> None:
    scheduler = caching(num_blocks=6)
    for token in (1, 2, 3):
        compute(scheduler, f"{token}", [token] * 8)
    compute(scheduler, "1 again", [1] * 8)
    compute(scheduler, "4", [4] * 8)
    assert scheduler.block_pool.find(make_key(Root(), [2] * 4)) is None
    for token in (1, 3, 4):
        assert scheduler.block_pool.find(make_key(Root(), [token] * 4)) is not None


def test_leaves_are_evicted_before_their_parents() -> None:
    scheduler = caching(num_blocks=4)
    compute(scheduler, "a", [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4])
    for num_blocks_left in (3, 2, 1, 0):
        nodes = [scheduler.block_pool.node_of(block) for block in range(4)]
        assert sum(node is not None for node in nodes) == num_blocks_left + 1
        scheduler.block_pool.grow(scheduler.block_pool.new_tables(), 4)
        parent: Parent = Root()
        found = 0
        for token in (1, 2, 3, 4):
            if (node := scheduler.block_pool.find(make_key(parent, [token] * 4))) is None:
                break
            found, parent = found + 1, node
        assert found == num_blocks_left, "what is left is a prefix"


def test_blocks_in_use_are_never_evicted() -> None:
    scheduler = caching(num_blocks=4)
    submit(scheduler, "a", [1] * 8, max_output=9)
    step(scheduler, token=1)
    for number in range(5):
        submit(scheduler, f"b{number}", [number + 2] * 4, max_output=1)
        step(scheduler, token=1)
        assert scheduler.block_pool.find(make_key(Root(), [1] * 4)) is not None


def test_empty_blocks_are_taken_before_any_block_is_evicted() -> None:
    scheduler = caching(num_blocks=5)
    compute(scheduler, "a", [1] * 8)
    compute(scheduler, "b", [2] * 3)  # its block is not full, so it is free again
    compute(scheduler, "c", [3] * 12)
    pool = scheduler.block_pool
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 5, 0)
    assert pool.find(make_key(Root(), [1] * 4)) is not None


def test_blocks_are_used_cached_or_free() -> None:
    scheduler = caching(num_blocks=10)
    pool = scheduler.block_pool
    submit(scheduler, "a", [1] * 10)
    step(scheduler)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (3, 0, 7)
    scheduler.abort("a")
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 8)
    assert pool.num_available == 10
    submit(scheduler, "b", [1] * 5)
    step(scheduler)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 1, 7)


def test_cached_blocks_are_available_to_new_sequences_and_shared_blocks_need_no_room() -> None:
    scheduler = caching(num_blocks=4)
    compute(scheduler, "old", [1] * 16)
    submit(scheduler, "a", [2] * 9)
    assert step(scheduler) == [(1, 0, 9)]
    submit(scheduler, "too long", [3] * 8)
    assert step(scheduler) == [(1, 9, 10)]
    scheduler.abort("too long")
    submit(scheduler, "fits", [2] * 9)
    assert step(scheduler) == [(1, 10, 11), (3, 8, 9)], "three blocks, but two of them are those of a"
