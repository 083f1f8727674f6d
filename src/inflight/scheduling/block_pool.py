"""`BlockPool`: who owns which block of the cache. Knows numbers of blocks, not what is in them.

Blocks that were never used are handed out last, so storage that the operating system commits on first touch grows
only as far as it is needed; blocks that were given back are handed out least recently used first.
"""

from array import array
from collections import deque
from collections.abc import Iterable


class BlockPool:
    """All blocks of one cache group: `num_blocks` of them, each free or held by one or more owners."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_references = [0] * num_blocks
        self._given_back: deque[int] = deque()
        self._num_touched = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._given_back) + self.num_blocks - self._num_touched

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def grow(self, table: "array[int]", num_tokens: int) -> bool:
        """Extend `table` until it holds `num_tokens` tokens; False, and nothing done, if too few blocks are free."""
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            table.append(self._take())
        return True

    def release(self, table: "array[int]") -> None:
        """Give back one reference to each block of `table` and empty it; the last blocks are reused first."""
        for block in reversed(table):
            self._drop(block)
        del table[:]

    def _take(self) -> int:
        if self._given_back:
            block = self._given_back.popleft()
        else:
            block = self._num_touched
            self._num_touched += 1
        self._num_references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        if self._num_references[block] < 1:
            raise RuntimeError(f"block {block} was given back by somebody who does not hold it")
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            self._given_back.append(block)

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
        free = [*self._given_back, *range(self._num_touched, self.num_blocks)]
        if sorted(free) != [block for block in range(self.num_blocks) if counted[block] == 0]:
            raise RuntimeError("the free list is not the set of blocks that nobody holds")
