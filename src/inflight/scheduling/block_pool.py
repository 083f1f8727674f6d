"""`BlockPool`: who owns which block of the cache, and which block is given up for another.

A block is used (somebody holds it), cached (nobody holds it, but its content can still be found), or free. Blocks are
taken in this order: free ones that were used before; ones that were never used, so storage that the operating system
commits on first touch grows only as far as it is needed; cached ones, least recently used first. A sequence gives its
blocks back last one first, so a prefix outlives what follows it.

A sequence has a table in each cache group; a group that keeps only a window lets go of blocks that have left it. All
groups take from the same blocks, so what one does not need is there for the others.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from inflight.contracts.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.plan import NO_BLOCK, BlockTable
from inflight.scheduling.prefix_cache import Key, Node, PrefixCache

BlockTables: TypeAlias = tuple[BlockTable, ...]
"""The blocks of one sequence, in each cache group. All are as long."""

_NOTHING = array("i", [NO_BLOCK])


class BlockPool:
    """All blocks of the cache: `num_blocks` of them, for the groups of `layout`."""

    def __init__(self, num_blocks: int, layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_size = layout.block_size
        self.lets_go = any(group != ALL_TOKENS for group in layout.groups)
        """Whether any group lets go of blocks."""
        self._num_references = [0] * num_blocks
        self._free: deque[int] = deque()
        self._num_touched = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, least recently used first
        self._prefix_cache = PrefixCache(len(layout.groups))

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds: free or cached."""
        return self.num_free + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that hold nothing to be found."""
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    # ------------------------------------------------------------------------------------- holding blocks

    def new_tables(self) -> BlockTables:
        """Those of a sequence that has nothing yet."""
        return tuple(array("i") for _ in self.layout.groups)

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Extend tables until they hold `num_tokens` tokens; False, and nothing done, if too few are available."""
        num_missing = -(-num_tokens // self.block_size) - len(tables[0])
        if num_missing <= 0:
            return True
        if num_missing * len(tables) > self.num_available:
            return False
        for table in tables:
            for _ in range(num_missing):
                table.append(self._take())
        return True

    def share(self, tables: BlockTables, num_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """Extend tables with what others hold, or is cached, up to `num_tokens` tokens, as far as it is still seen.

        `blocks`: of each group, those behind the table's last.
        """
        self.let_go(tables, num_tokens)
        for group, table, added in zip(self.layout.groups, tables, blocks, strict=True):
            num_unseen = group.first_visible(num_tokens) // self.block_size - len(table)
            for number, block in enumerate(added):
                if number < num_unseen:
                    table.append(NO_BLOCK)
                else:
                    self._hold(block)
                    table.append(block)

    def let_go(self, tables: BlockTables, position: int) -> None:
        """Give up the blocks that no query sees any more at this position or behind it."""
        for group, table in zip(self.layout.groups, tables, strict=True):
            index = min(group.first_visible(position) // self.block_size, len(table)) - 1
            while index >= 0 and table[index] != NO_BLOCK:
                self._drop(table[index])
                table[index] = NO_BLOCK
                index -= 1

    def holds(self, tables: BlockTables, position: int) -> bool:
        """Whether everything is there that a query at this position sees, as far as the tables go."""
        firsts = (group.first_visible(position) // self.block_size for group in self.layout.groups)
        return all(table[first : first + 1] != _NOTHING for first, table in zip(firsts, tables, strict=True))

    def replace(self, table: BlockTable, index: int, block: int) -> None:
        """Hold `block` instead of the one at `index`, which has the same content."""
        self._hold(block)
        self._drop(table[index])
        table[index] = block

    def release(self, tables: BlockTables) -> None:
        """Give back one reference to each block of `tables` and empty them; the last blocks are reused first."""
        for blocks in zip(*map(reversed, tables), strict=True):
            for block in blocks:
                if block != NO_BLOCK:
                    self._drop(block)
        for table in tables:
            del table[:]

    def num_holders(self, block: int) -> int:
        """How many tables name this block."""
        return self._num_references[block]

    # ------------------------------------------------------------------------------------- finding content

    def find(self, key: Key) -> Node | None:
        """The node of this key, if anything is known of it."""
        return self._prefix_cache.find(key)

    def node_of(self, block: int) -> Node | None:
        """What a block holds, if that can be found."""
        return self._prefix_cache.node_of(block)

    def add(self, key: Key) -> Node:
        """A node for a key of which nothing is known; the blocks that hold it are to be remembered."""
        return self._prefix_cache.add(key)

    def remember(self, node: Node, group: int, block: int) -> None:
        """Let the content of a block that somebody holds be found from now on; the node must have none there."""
        self._prefix_cache.put(node, group, block)

    def forget(self, block: int) -> None:
        """Let a block's content not be found any more."""
        self._prefix_cache.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    # ------------------------------------------------------------------------------------- one block

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        elif self._num_touched < self.num_blocks:
            block = self._num_touched
            self._num_touched += 1
        else:
            block, _ = self._cached.popitem(last=False)
            self._prefix_cache.forget(block)
        self._num_references[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._num_references[block] == 0:
            del self._cached[block]
        self._num_references[block] += 1

    def _drop(self, block: int) -> None:
        if self._num_references[block] < 1:
            raise RuntimeError(f"block {block} was given back by somebody who does not hold it")
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            if block in self._prefix_cache:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self, sequences: Iterable[BlockTables]) -> None:
        """Raise `RuntimeError` unless the references are exactly those of all `sequences` and no block is lost."""
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
        available = [*self._free, *self._cached, *range(self._num_touched, self.num_blocks)]
        if sorted(available) != [block for block in range(self.num_blocks) if counted[block] == 0]:
            raise RuntimeError("the free and cached blocks are not those that nobody holds")
        if any((block in self._prefix_cache) == (block not in self._cached) for block in [*self._free, *self._cached]):
            raise RuntimeError("the cached blocks are not those, of all that nobody holds, whose content is known")
