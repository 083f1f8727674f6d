"""`CacheGroup`: layers that keep the same tokens; `CacheLayout`: the number of blocks that a sequence takes. Plain
data."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The tokens of a sequence that a group of layers keeps: all, or those that a later query can still see.

    Attributes:
        window: a query at position i sees keys j with `i - j < window`; None: all before it.
        chunk: a query sees only keys in its own aligned chunk of this many positions; None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        words = [f"the last {self.window} tokens"] if self.window is not None else []
        words += [f"aligned chunks of {self.chunk} tokens"] if self.chunk is not None else []
        return " in ".join(words) or "all tokens"

    def first_visible(self, position: int) -> int:
        """The first token that a query at this position, or at any later one, may see."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def max_num_blocks(self, num_tokens: int, max_span: int, block_size: int) -> int:
        """The most blocks that a sequence takes while it grows to `num_tokens` tokens, in spans of up to `max_span`."""
        num_blocks = -(-num_tokens // block_size)
        reach = min((each for each in (self.window, self.chunk) if each is not None), default=num_tokens)
        return min(num_blocks, (reach + max_span + block_size - 2) // block_size + 1)


ALL_TOKENS = CacheGroup()


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache's layout: every sequence has a block table in each cache group, and any group may take any block.

    Attributes:
        block_size: tokens in a block.
        groups: the cache groups. A block holds keys and values of one group's layers.
        max_span: the most tokens of one sequence that a step computes.
    """

    block_size: int
    groups: Sequence[CacheGroup] = (ALL_TOKENS,)
    max_span: int = 1

    def max_num_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence takes while it grows to `num_tokens` tokens."""
        return sum(group.max_num_blocks(num_tokens, self.max_span, self.block_size) for group in self.groups)

    def longest_sequence(self, num_blocks: int, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that fits into `num_blocks` blocks."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.max_num_blocks)
