"""Blocks are allocated and freed in a defined order, all or nothing, and never have two owners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup, CacheLayout
from inflight.contracts.step.plan import NO_BLOCK
from inflight.scheduling.block_pool import BlockPool, BlockTables
from inflight.scheduling.prefix_cache import PrefixNode, Root, make_key


def pool_of(num_blocks: int, block_size: int, *groups: CacheGroup) -> BlockPool:
    return BlockPool(num_blocks, CacheLayout(block_size, groups or (ALL_TOKENS,)))


def grown(pool: BlockPool, num_tokens: int) -> BlockTables:
    tables = pool.new_tables()
    assert pool.grow(tables, num_tokens)
    return tables


def blocks(tables: BlockTables) -> list[int]:
    """The blocks of the first group."""
    return list(tables[0])


def remember(pool: BlockPool, token_ids: list[int], tables: BlockTables) -> PrefixNode:
    """Remember the blocks of a sequence that begins with these tokens."""
    node = pool.add(make_key(Root(), token_ids))
    for group, table in enumerate(tables):
        pool.remember(node, group, table[0])
    return node


def test_a_new_pool_is_free_and_hands_out_its_blocks_in_order() -> None:
    pool = pool_of(4, 16)
    assert pool.num_available == 4
    assert blocks(grown(pool, 3 * 16)) == [0, 1, 2]
    assert pool.num_available == 1


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_one_block_is_taken_per_started_block_size_of_tokens(num_tokens: int, num_blocks: int) -> None:
    pool = pool_of(8, 4)
    assert pool.layout.max_num_blocks(num_tokens) == num_blocks
    assert len(blocks(grown(pool, num_tokens))) == num_blocks


def test_a_table_grows_only_by_the_missing_blocks() -> None:
    pool = pool_of(8, 4)
    table = grown(pool, 5)
    assert pool.grow(table, 8)
    assert blocks(table) == [0, 1]
    assert pool.grow(table, 9)
    assert blocks(table) == [0, 1, 2]
    assert pool.grow(table, 3), "a table that is long enough stays as it is"
    assert blocks(table) == [0, 1, 2]


def test_grow_takes_all_the_blocks_that_it_needs_or_none() -> None:
    pool = pool_of(3, 4)
    table = grown(pool, 4)
    assert not pool.grow(table, 16)
    assert blocks(table) == [0]
    assert pool.num_available == 2
    assert pool.grow(table, 12)
    assert blocks(table) == [0, 1, 2]


def test_blocks_that_were_never_used_are_allocated_last() -> None:
    pool = pool_of(4, 1)
    pool.release(grown(pool, 2))
    assert blocks(grown(pool, 4)) == [1, 0, 2, 3]


def test_freed_blocks_are_reused_least_recently_used_first() -> None:
    pool = pool_of(4, 1)
    first, second = grown(pool, 1), grown(pool, 1)
    grown(pool, 2)
    pool.release(second)
    pool.release(first)
    assert blocks(grown(pool, 2)) == [1, 0]


def test_the_last_blocks_of_a_table_are_reused_first() -> None:
    pool = pool_of(3, 1)
    pool.release(grown(pool, 3))
    assert blocks(grown(pool, 3)) == [2, 1, 0]


def test_release_empties_the_table() -> None:
    pool = pool_of(2, 1)
    table = grown(pool, 2)
    pool.release(table)
    assert blocks(table) == []
    assert pool.num_available == 2
    pool.release(table)
    assert pool.num_available == 2, "an empty table gives back nothing"


def test_freeing_a_block_twice_raises() -> None:
    pool = pool_of(2, 1)
    table = grown(pool, 1)
    copy = tuple(each[:] for each in table)
    pool.release(table)
    with pytest.raises(RuntimeError, match="block 0 was freed more often than it was taken"):
        pool.release(copy)
    assert pool.num_available == 2


def test_a_shared_block_is_free_once_all_its_holders_have_released_it() -> None:
    pool = pool_of(3, 1)
    first, second = grown(pool, 2), pool.new_tables()
    pool.share(second, 1, [blocks(first)[:1]])
    assert [pool.num_holders(block) for block in range(3)] == [2, 1, 0]
    pool.release(first)
    assert (pool.num_available, pool.num_holders(0)) == (2, 1)
    pool.release(second)
    assert pool.num_available == 3


def test_a_findable_block_without_holders_is_cached_and_can_be_held_again() -> None:
    pool = pool_of(3, 2)
    table = grown(pool, 4)
    node = remember(pool, [1, 2], table)
    assert pool.find(make_key(Root(), [1, 2])) is node is pool.node_of(0)
    pool.release(table)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 2)
    pool.share(table, 2, [node.blocks])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 2)
    pool.check([table])


def test_a_cached_block_is_allocated_last_and_is_no_longer_found() -> None:
    pool = pool_of(3, 1)
    table = grown(pool, 1)
    remember(pool, [1], table)
    pool.release(table)
    assert blocks(grown(pool, 3)) == [1, 2, 0]
    assert pool.find(make_key(Root(), [1])) is None
    assert pool.node_of(0) is None


def test_a_block_whose_content_is_forgotten_is_freed_or_stays_with_its_holder() -> None:
    pool = pool_of(2, 1)
    held, given_back = grown(pool, 1), grown(pool, 1)
    remember(pool, [1], held)
    remember(pool, [2], given_back)
    pool.release(given_back)
    pool.forget(0)
    pool.forget(1)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 1)
    pool.check([held])


def test_a_block_can_be_replaced_by_another_with_the_same_content() -> None:
    pool = pool_of(3, 1)
    first, second = grown(pool, 1), grown(pool, 2)
    pool.replace(second[0], 0, blocks(first)[0])
    assert blocks(second) == [0, 2]
    assert (pool.num_holders(0), pool.num_holders(1)) == (2, 0)
    pool.check([first, second])


def test_check_accepts_the_tables_that_hold_the_blocks() -> None:
    pool = pool_of(4, 1)
    tables = [grown(pool, 2), grown(pool, 1), pool.new_tables()]
    pool.check(tables)
    pool.release(tables[0])
    pool.check(tables)


def test_check_names_blocks_that_a_table_holds_without_owning_or_has_lost() -> None:
    pool = pool_of(4, 1)
    table, other = grown(pool, 2), grown(pool, 1)
    with pytest.raises(RuntimeError, match=r"blocks \[2\] are held by tables \[0\] times, but counted \[1\] times"):
        pool.check([table])
    with pytest.raises(RuntimeError, match=r"blocks \[0, 1\] are held by tables \[2, 2\] times"):
        pool.check([table, table, other])


def test_check_finds_a_block_that_has_no_holder_and_is_not_free() -> None:
    pool = pool_of(4, 1)
    pool.release(grown(pool, 2))
    pool._free.pop()
    with pytest.raises(RuntimeError, match="the free and cached blocks are not those that no table names"):
        pool.check([])


def test_check_finds_a_cached_block_with_unknown_content() -> None:
    pool = pool_of(2, 1)
    table = grown(pool, 1)
    remember(pool, [1], table)
    pool.release(table)
    pool._prefix_cache.forget(0)
    with pytest.raises(
        RuntimeError, match="the cached blocks are not those, of all that no table names, whose content"
    ):
        pool.check([])


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 16)), max_size=40))
def test_each_block_has_one_owner_or_is_free_after_any_growth_and_release(
    num_blocks: int, block_size: int, actions: list[tuple[int, int]]
) -> None:
    pool = pool_of(num_blocks, block_size)
    tables = [pool.new_tables() for _ in range(4)]
    for index, num_tokens in actions:
        table, num_free, before = tables[index], pool.num_available, blocks(tables[index])
        if num_tokens == -1:
            pool.release(table)
        else:
            num_missing = max(0, -(-num_tokens // block_size) - len(before))
            assert pool.grow(table, num_tokens) == (num_missing <= num_free)
            assert blocks(table)[: len(before)] == before, "what a table holds already stays where it is"
            assert len(blocks(table)) == len(before) + (num_missing if num_missing <= num_free else 0)
        pool.check(tables)
        held = [block for table in tables for block in blocks(table)]
        assert len(held) == len(set(held))
        assert pool.num_available == num_blocks - len(held)


# ------------------------------------------------------------------------------------------- windows

WINDOW = CacheGroup(window=4)


def test_groups_share_one_pool_of_blocks() -> None:
    pool = pool_of(6, 2, ALL_TOKENS, WINDOW)
    tables = grown(pool, 4)
    assert [list(table) for table in tables] == [[0, 1], [2, 3]]
    assert not pool.grow(tables, 8)
    assert pool.grow(tables, 6)
    assert pool.num_available == 0


@pytest.mark.parametrize(
    ("group", "position", "kept"),
    [
        (WINDOW, 4, [0, 1, 2, 3]),
        (WINDOW, 5, [NO_BLOCK, 1, 2, 3]),
        (WINDOW, 6, [NO_BLOCK, 1, 2, 3]),
        (WINDOW, 7, [NO_BLOCK, NO_BLOCK, 2, 3]),
        (WINDOW, 8, [NO_BLOCK, NO_BLOCK, 2, 3]),
        (WINDOW, 100, [NO_BLOCK] * 4),
        (CacheGroup(chunk=6), 5, [0, 1, 2, 3]),
        (CacheGroup(chunk=6), 6, [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3]),
        (CacheGroup(window=4, chunk=6), 7, [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3]),
        (ALL_TOKENS, 100, [0, 1, 2, 3]),
    ],
)
def test_blocks_that_no_later_query_sees_are_released(group: CacheGroup, position: int, kept: list[int]) -> None:
    """With a window of 4, the query at position 5 sees positions 2 to 5."""
    pool = pool_of(4, 2, group)
    tables = grown(pool, 8)
    pool.release_before(tables, position)
    assert blocks(tables) == kept
    assert pool.num_used == 4 - kept.count(NO_BLOCK)
    pool.check([tables])
    pool.release_before(tables, position)
    assert blocks(tables) == kept
    pool.release(tables)
    assert pool.num_free == 4


def test_of_shared_blocks_only_those_that_will_be_seen_are_held() -> None:
    pool = pool_of(12, 2, ALL_TOKENS, WINDOW)
    first, second = grown(pool, 10), grown(pool, 2)
    shared = [table[1:4] for table in first]
    pool.share(second, 8, shared)
    assert [list(table) for table in second] == [[10, 1, 2, 3], [NO_BLOCK, NO_BLOCK, 7, 8]]
    pool.check([first, second])
    assert pool.holds(second, 8)
    assert pool.holds(second, 7)
    assert not pool.holds(second, 6)
    assert all(pool.holds(first, position) for position in range(12))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=12),
)
def test_a_sequence_never_takes_more_blocks_than_the_layout_says(
    windows: list[int], block_size: int, spans: list[int]
) -> None:
    groups = [ALL_TOKENS, *(CacheGroup(window) for window in windows), CacheGroup(chunk=windows[0])]
    layout = CacheLayout(block_size, groups, max(spans))
    pool = BlockPool(layout.max_num_blocks(sum(spans)), layout)
    tables, num_computed = pool.new_tables(), 0
    for span in spans:
        pool.release_before(tables, max(0, num_computed - 1))
        assert pool.grow(tables, num_computed + span)
        assert pool.num_used <= layout.max_num_blocks(num_computed + span)
        assert pool.holds(tables, num_computed)
        num_computed += span
    assert layout.longest_sequence(pool.num_blocks, 1000) >= num_computed


def test_the_longest_sequence_is_limited_by_the_groups_that_keep_all_tokens() -> None:
    layout = CacheLayout(16, (ALL_TOKENS, *[CacheGroup(window=512)] * 5), max_span=16)
    most = layout.longest_sequence(500 + 5 * 34, 10**6)
    assert most == 500 * 16
    assert layout.max_num_blocks(most) == 670 < layout.max_num_blocks(most + 1)
    assert layout.longest_sequence(670, 1000) == 1000
    assert layout.longest_sequence(0, 1000) == 0
