"""`BlockPool`: who owns which block of the cache, and which block is given up for another.

A block is used (somebody holds it), cached (nobody holds it, but its content can still be found), or free. Blocks are
taken in this order: free ones that were used before; ones that were never used, so storage that the operating system
commits on first touch grows only as far as it is needed; cached ones, least recently used first. A sequence gives its
blocks back last one first, and whoever holds a block holds those before it, so a prefix outlives what follows it.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from inflight.scheduling.prefix_cache import Key, Node, PrefixCache


class BlockPool:
    """All blocks of one cache group: `num_blocks` of them, each of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_references = [0] * num_blocks
        self._free: deque[int] = deque()
        self._num_touched = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, least recently used first
        self._prefix_cache = PrefixCache()

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

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------------------------- holding blocks

    def grow(self, table: "array[int]", num_tokens: int) -> bool:
        """Extend `table` until it holds `num_tokens` tokens; False, and nothing done, if too few are available."""
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            table.append(self._take())
        return True

    def share(self, table: "array[int]", block: int) -> None:
        """Append a block that others hold, or that is cached."""
        self._hold(block)
        table.append(block)

    def replace(self, table: "array[int]", index: int, block: int) -> None:
        """Hold `block` instead of the one at `index`, which has the same content."""
        self._hold(block)
        self._drop(table[index])
        table[index] = block

    def release(self, table: "array[int]") -> None:
        """Give back one reference to each block of `table` and empty it; the last blocks are reused first."""
        for block in reversed(table):
            self._drop(block)
        del table[:]

    def num_holders(self, block: int) -> int:
        """How many tables name this block."""
        return self._num_references[block]

    # ------------------------------------------------------------------------------------- finding content

    def find(self, key: Key) -> Node | None:
        """The node of this key, if a block still holds its content."""
        return self._prefix_cache.find(key)

    def node_of(self, block: int) -> Node | None:
        """What a block holds, if that can be found."""
        return self._prefix_cache.node_of(block)

    def remember(self, key: Key, block: int) -> Node:
        """Let the content of a block that somebody holds be found from now on; `key` must be new."""
        return self._prefix_cache.add(key, block)

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

    def check(self, tables: Iterable["array[int]"]) -> None:
        """Raise `RuntimeError` unless the references are exactly those of `tables` and no block is lost."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
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
