"""Blocks are handed out and taken back in a stated order, all or nothing, and never to two owners."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Root, make_key


def new_table() -> "array[int]":
    return array("i")


def grown(pool: BlockPool, num_tokens: int) -> "array[int]":
    table = new_table()
    assert pool.grow(table, num_tokens)
    return table


def test_a_new_pool_is_free_and_hands_out_its_blocks_in_order() -> None:
    pool = BlockPool(4, 16)
    assert pool.num_available == 4
    assert list(grown(pool, 3 * 16)) == [0, 1, 2]
    assert pool.num_available == 1


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_is_taken_for_each_block_size_tokens_begun(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(8, 4)
    assert pool.num_blocks_for(num_tokens) == num_blocks
    assert len(grown(pool, num_tokens)) == num_blocks


def test_a_table_grows_only_by_what_it_lacks() -> None:
    pool = BlockPool(8, 4)
    table = grown(pool, 5)
    assert pool.grow(table, 8)
    assert list(table) == [0, 1]
    assert pool.grow(table, 9)
    assert list(table) == [0, 1, 2]
    assert pool.grow(table, 3), "a table that is long enough stays as it is"
    assert list(table) == [0, 1, 2]


def test_grow_takes_nothing_unless_it_gets_everything() -> None:
    pool = BlockPool(3, 4)
    table = grown(pool, 4)
    assert not pool.grow(table, 16)
    assert list(table) == [0]
    assert pool.num_available == 2
    assert pool.grow(table, 12)
    assert list(table) == [0, 1, 2]


def test_blocks_that_were_never_used_are_handed_out_last() -> None:
    pool = BlockPool(4, 1)
    pool.release(grown(pool, 2))
    assert list(grown(pool, 4)) == [1, 0, 2, 3]


def test_blocks_given_back_are_reused_least_recently_used_first() -> None:
    pool = BlockPool(4, 1)
    first, second = grown(pool, 1), grown(pool, 1)
    grown(pool, 2)
    pool.release(second)
    pool.release(first)
    assert list(grown(pool, 2)) == [1, 0]


def test_of_one_table_the_last_blocks_are_reused_first() -> None:
    pool = BlockPool(3, 1)
    pool.release(grown(pool, 3))
    assert list(grown(pool, 3)) == [2, 1, 0]


def test_release_empties_the_table() -> None:
    pool = BlockPool(2, 1)
    table = grown(pool, 2)
    pool.release(table)
    assert list(table) == []
    assert pool.num_available == 2
    pool.release(table)
    assert pool.num_available == 2, "an empty table gives back nothing"


def test_giving_back_a_block_twice_raises() -> None:
    pool = BlockPool(2, 1)
    table = grown(pool, 1)
    copy = table[:]
    pool.release(table)
    with pytest.raises(RuntimeError, match="block 0 was given back by somebody who does not hold it"):
        pool.release(copy)
    assert pool.num_available == 2


def test_a_shared_block_is_free_when_all_who_hold_it_have_given_it_back() -> None:
    pool = BlockPool(3, 1)
    first, second = grown(pool, 2), new_table()
    pool.share(second, first[0])
    assert [pool.num_holders(block) for block in range(3)] == [2, 1, 0]
    pool.release(first)
    assert (pool.num_available, pool.num_holders(0)) == (2, 1)
    pool.release(second)
    assert pool.num_available == 3


def test_a_block_that_can_be_found_is_cached_when_nobody_holds_it_and_can_be_held_again() -> None:
    pool = BlockPool(3, 2)
    table = grown(pool, 4)
    node = pool.remember(make_key(Root(), [1, 2]), table[0])
    assert pool.find(make_key(Root(), [1, 2])) is node is pool.node_of(0)
    pool.release(table)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 2)
    pool.share(table, node.block)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 2)
    pool.check([table])


def test_a_cached_block_is_taken_last_and_not_found_any_more() -> None:
    pool = BlockPool(3, 1)
    table = grown(pool, 1)
    pool.remember(make_key(Root(), [1]), table[0])
    pool.release(table)
    assert list(grown(pool, 3)) == [1, 2, 0]
    assert pool.find(make_key(Root(), [1])) is None
    assert pool.node_of(0) is None


def test_a_block_whose_content_is_forgotten_is_free_or_stays_with_its_holder() -> None:
    pool = BlockPool(2, 1)
    held, given_back = grown(pool, 1), grown(pool, 1)
    pool.remember(make_key(Root(), [1]), held[0])
    pool.remember(make_key(Root(), [2]), given_back[0])
    pool.release(given_back)
    pool.forget(0)
    pool.forget(1)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 1)
    pool.check([held])


def test_a_block_can_be_replaced_by_another_of_the_same_content() -> None:
    pool = BlockPool(3, 1)
    first, second = grown(pool, 1), grown(pool, 2)
    pool.replace(second, 0, first[0])
    assert list(second) == [0, 2]
    assert (pool.num_holders(0), pool.num_holders(1)) == (2, 0)
    pool.check([first, second])


def test_check_accepts_the_tables_that_hold_the_blocks() -> None:
    pool = BlockPool(4, 1)
    tables = [grown(pool, 2), grown(pool, 1), new_table()]
    pool.check(tables)
    pool.release(tables[0])
    pool.check(tables)


def test_check_names_the_blocks_that_a_table_holds_without_having_taken_them_or_lost() -> None:
    pool = BlockPool(4, 1)
    table, other = grown(pool, 2), grown(pool, 1)
    with pytest.raises(RuntimeError, match=r"blocks \[2\] are held by tables \[0\] times, but counted \[1\] times"):
        pool.check([table])
    with pytest.raises(RuntimeError, match=r"blocks \[0, 1\] are held by tables \[2, 2\] times"):
        pool.check([table, table, other])


def test_check_finds_a_block_that_nobody_holds_and_that_is_not_free_either() -> None:
    pool = BlockPool(4, 1)
    pool.release(grown(pool, 2))
    pool._free.pop()
    with pytest.raises(RuntimeError, match="the free and cached blocks are not those that nobody holds"):
        pool.check([])


def test_check_finds_a_cached_block_whose_content_is_not_known() -> None:
    pool = BlockPool(2, 1)
    table = grown(pool, 1)
    pool.remember(make_key(Root(), [1]), table[0])
    pool.release(table)
    pool._prefix_cache.forget(0)
    with pytest.raises(RuntimeError, match="the cached blocks are not those, of all that nobody holds, whose content"):
        pool.check([])


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 16)), max_size=40))
def test_whatever_is_grown_and_released_each_block_has_one_owner_or_is_free(
    num_blocks: int, block_size: int, actions: list[tuple[int, int]]
) -> None:
    pool = BlockPool(num_blocks, block_size)
    tables = [new_table() for _ in range(4)]
    for index, num_tokens in actions:
        table, num_free, before = tables[index], pool.num_available, list(tables[index])
        if num_tokens == -1:
            pool.release(table)
        else:
            num_missing = max(0, -(-num_tokens // block_size) - len(table))
            assert pool.grow(table, num_tokens) == (num_missing <= num_free)
            assert list(table[: len(before)]) == before, "what a table holds already stays where it is"
            assert len(table) == len(before) + (num_missing if num_missing <= num_free else 0)
        pool.check(tables)
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held))
        assert pool.num_available == num_blocks - len(held)
