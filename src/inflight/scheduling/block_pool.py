"""`BlockPool`: allocates, shares and evicts the cache's blocks.

A block is used (referenced by a table), cached (unreferenced, but its content can still be found), or free:

| state  | named by tables | found by content | becomes                                                            |
|--------|-----------------|------------------|--------------------------------------------------------------------|
| free   | none            | no               | used, when a sequence grows                                        |
| used   | one or more     | perhaps          | cached or free, when the last table gives it back                  |
| cached | none            | yes              | used again, when a prefix is found; free or used, when it is evicted |

A growing sequence takes, in this order: free blocks used before; blocks never used, so that storage which the operating
system commits on first touch grows only as needed; cached blocks, least recently used first; cached blocks that are
kept for a session (`Retention`). A sequence frees its last blocks first, so a prefix outlives its continuations.

A sequence has a table in each cache group. A group that keeps only a window frees blocks that have left it. All groups
share the pool.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.step.plan import NO_BLOCK, BlockTable
from inflight.scheduling.prefix_cache import CacheWatch, Key, PrefixCache, PrefixNode

BlockTables: TypeAlias = tuple[BlockTable, ...]
"""The blocks of one sequence in each cache group; all tables are equally long."""

_NOTHING = array("i", [NO_BLOCK])


class BlockPool:
    """All `num_blocks` blocks of the cache, for the cache groups of `layout`."""

    def __init__(self, num_blocks: int, layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_size = layout.block_size
        self.lets_go = any(group != ALL_TOKENS for group in layout.groups)
        """Whether any group frees blocks behind a window."""
        self._num_references = [0] * num_blocks
        self._num_times_taken = [0] * num_blocks
        self._free: deque[int] = deque()
        self._num_touched = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached, too
        self._num_keepers = [0] * num_blocks
        self.give_up_kept: Callable[[], None] = lambda: None
        """Called when only kept blocks are left, to choose those that are kept no longer."""
        self._prefix_cache = PrefixCache(len(layout.groups))

    @property
    def num_available(self) -> int:
        """Unreferenced blocks: free or cached."""
        return self.num_free + self.num_cached

    @property
    def num_free(self) -> int:
        """Unreferenced blocks without known content."""
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found."""
        return len(self._cached) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Cached blocks that are taken last."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - self.num_available

    # ------------------------------------------------------------------------------------- holding blocks

    def new_tables(self) -> BlockTables:
        """The empty tables of a new sequence."""
        return tuple(array("i") for _ in self.layout.groups)

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Extend tables to hold `num_tokens` tokens. Returns False, changing nothing, if too few blocks are
        available."""
        num_missing = -(-num_tokens // self.block_size) - len(tables[0])
        if num_missing <= 0:
            return True
        if num_missing * len(tables) > self.num_available:
            return False
        for table in tables:
            for _ in range(num_missing):
                table.append(self._take())
        return True

    def shrink(self, tables: BlockTables, num_tokens: int) -> None:
        """Free the blocks beyond `num_tokens` tokens, last first."""
        num_blocks = -(-num_tokens // self.block_size)
        for table in tables:
            while len(table) > num_blocks:
                self._drop(table.pop())

    def share(self, tables: BlockTables, num_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """Extend tables to `num_tokens` tokens with shared or cached blocks; blocks that no later query sees become
        `NO_BLOCK`.

        Args:
            blocks: for each group, the blocks that follow the table's last.
        """
        self.release_before(tables, num_tokens)
        for group, table, added in zip(self.layout.groups, tables, blocks, strict=True):
            num_unseen = group.first_visible(num_tokens) // self.block_size - len(table)
            for number, block in enumerate(added):
                if number < num_unseen:
                    table.append(NO_BLOCK)
                else:
                    self._hold(block)
                    table.append(block)

    def release_before(self, tables: BlockTables, position: int) -> None:
        """Free the blocks that no query at this position or after it can see."""
        for group, table in zip(self.layout.groups, tables, strict=True):
            index = min(group.first_visible(position) // self.block_size, len(table)) - 1
            while index >= 0 and table[index] != NO_BLOCK:
                self._drop(table[index])
                table[index] = NO_BLOCK
                index -= 1

    def holds(self, tables: BlockTables, position: int) -> bool:
        """Whether the tables, as far as they reach, have all blocks that a query at this position sees."""
        firsts = (group.first_visible(position) // self.block_size for group in self.layout.groups)
        return all(table[first : first + 1] != _NOTHING for first, table in zip(firsts, tables, strict=True))

    def replace(self, table: BlockTable, index: int, block: int) -> None:
        """Replace the block at `index` by `block`, which has the same content."""
        self._hold(block)
        self._drop(table[index])
        table[index] = block

    def release(self, tables: BlockTables) -> None:
        """Drop one reference to each block of `tables`, last first, and empty the tables."""
        for blocks in zip(*map(reversed, tables), strict=True):
            for block in blocks:
                if block != NO_BLOCK:
                    self._drop(block)
        for table in tables:
            del table[:]

    def num_holders(self, block: int) -> int:
        """The block's reference count."""
        return self._num_references[block]

    def holders(self) -> bytes:
        """A byte for each block: 0: free; 1: cached; else its reference count plus 1, at most 255."""
        states = bytearray(number and min(number + 1, 255) for number in self._num_references)
        for block in (*self._cached, *self._kept):
            states[block] = 1
        return bytes(states)

    def num_times_taken(self, block: int) -> int:
        """The number of reallocations of this block: while it stays the same, so does a full block's content.
        Thread-safe."""
        return self._num_times_taken[block]

    # ------------------------------------------------------------------------------------- finding content

    def watch(self, watch: CacheWatch) -> None:
        """Report changes of the prefix cache to a watch."""
        self._prefix_cache.watch = watch

    def find(self, key: Key) -> PrefixNode | None:
        """The prefix cache's node of this key, if any."""
        return self._prefix_cache.find(key)

    def node_of(self, block: int) -> PrefixNode | None:
        """The node of a block's content, if known."""
        return self._prefix_cache.node_of(block)

    def add(self, key: Key) -> PrefixNode:
        """Add a node for a new key; `remember` gives it blocks."""
        return self._prefix_cache.add(key)

    def remember(self, node: PrefixNode, group: int, block: int) -> None:
        """Register a used block as a node's; the node must have no block in this group yet."""
        self._prefix_cache.put(node, group, block)

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        self._prefix_cache.forget(block)
        self._num_keepers[block] = 0
        if self._num_references[block] == 0:
            self._unlist(block)
            self._free.append(block)

    def forget_all(self) -> None:
        """Free all cached blocks."""
        for block in (*self._cached, *self._kept):
            self.forget(block)

    # ------------------------------------------------------------------------------------- keeping content

    def keep(self, block: int) -> None:
        """Take a block last while it is cached, until `unkeep` was called as often or its content is forgotten."""
        self._num_keepers[block] += 1
        if block in self._cached:
            del self._cached[block]
            self._kept[block] = None

    def unkeep(self, block: int) -> None:
        """Undo one `keep`."""
        self._num_keepers[block] = max(0, self._num_keepers[block] - 1)
        if self._num_keepers[block] == 0 and block in self._kept:
            del self._kept[block]
            self._cached[block] = None

    def is_kept(self, block: int) -> bool:
        """Whether a block is taken last when it is cached."""
        return self._num_keepers[block] > 0

    # ------------------------------------------------------------------------------------- one block

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        elif self._num_touched < self.num_blocks:
            block = self._num_touched
            self._num_touched += 1
        else:
            if not self._cached:
                self.give_up_kept()
            block, _ = (self._cached or self._kept).popitem(last=False)
            self._prefix_cache.forget(block)
            self._num_keepers[block] = 0
        self._num_references[block] = 1
        self._num_times_taken[block] += 1
        return block

    def _hold(self, block: int) -> None:
        if self._num_references[block] == 0:
            self._unlist(block)
        self._num_references[block] += 1

    def _drop(self, block: int) -> None:
        if self._num_references[block] < 1:
            raise RuntimeError(f"block {block} was freed more often than it was taken")
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            if block in self._prefix_cache:
                (self._kept if self._num_keepers[block] else self._cached)[block] = None
            else:
                self._free.append(block)

    def _unlist(self, block: int) -> None:
        """Take a block out of the cached ones."""
        del (self._kept if block in self._kept else self._cached)[block]

    def check(self, sequences: Iterable[BlockTables]) -> None:
        """Raise `RuntimeError` unless the reference counts match all `sequences` and no block is lost."""
        counted = [0] * self.num_blocks
        for block in (block for tables in sequences for table in tables for block in table):
            if block != NO_BLOCK:
                counted[block] += 1
        if counted != self._num_references:
            wrong = [block for block in range(self.num_blocks) if counted[block] != self._num_references[block]]
            raise RuntimeError(
                f"blocks {wrong} are held by tables {[counted[block] for block in wrong]} times, but "
                f"counted {[self._num_references[block] for block in wrong]} times"
            )
        cached = self._cached.keys() | self._kept.keys()
        available = [*self._free, *self._cached, *self._kept, *range(self._num_touched, self.num_blocks)]
        if sorted(available) != [block for block in range(self.num_blocks) if counted[block] == 0]:
            raise RuntimeError("the free and cached blocks are not those that no table names")
        if any((block in self._prefix_cache) == (block not in cached) for block in [*self._free, *cached]):
            raise RuntimeError("the cached blocks are not those, of all that no table names, whose content is known")
        if any(not self._num_keepers[block] for block in self._kept) or any(
            map(self._num_keepers.__getitem__, self._cached)
        ):
            raise RuntimeError("the kept blocks are not those, of all that are cached, which are to be kept")
