"""`StepPrefixes`: where the texts of one step lie in its cache, so that what several begin with is computed once.

A block that one text computes is read by those after it in the row: a backend finishes all writes of a layer before any
read. Nothing is kept for the next step.
"""

from typing import NamedTuple

from inflight.contracts.pooling import PooledText


class Place(NamedTuple):
    """Where a text lies.

    Attributes:
        start: how many of its first tokens are computed for another text.
        blocks: its blocks in the cache, in order.
    """

    start: int
    blocks: list[int]


class StepPrefixes:
    """The texts of one step, in the order of the row.

    Args:
        block_size: tokens of a block.
        are_shared: whether texts share blocks: where a token's states depend on those before it alone, and only those
            of the last token are wanted.
        padding: a text that ends with this token shares nothing: what is its last token is the head's decision.
    """

    def __init__(self, block_size: int, *, are_shared: bool, padding: int | None = None) -> None:
        self._block_size, self._are_shared, self._padding = block_size, are_shared, padding
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # full blocks, by the one before and their tokens
        self._num_blocks = 0

    def can_share(self, text: PooledText) -> bool:
        """Whether a text may share blocks with others, and only its last token counts."""
        return self._are_shared and text.token_types is None and text.token_ids[-1] != self._padding

    def place(self, text: PooledText) -> Place:
        """The place of the next text. It computes its last token, and at least that."""
        ids, size = text.token_ids, self._block_size
        if not self.can_share(text):
            return Place(0, [self._new_block() for _ in range(0, len(ids), size)])
        blocks: list[int] = []
        parent, start = -1, 0
        while start + size < len(ids):
            found = self._known.get((parent, tuple(ids[start : start + size])))
            if found is None:
                break
            blocks.append(found)
            parent, start = found, start + size
        for first in range(start, len(ids), size):
            tokens, own = tuple(ids[first : first + size]), self._new_block()
            blocks.append(own)
            if len(tokens) == size:
                self._known.setdefault((parent, tokens), own)
            parent = own
        return Place(start, blocks)

    def _new_block(self) -> int:
        self._num_blocks += 1
        return self._num_blocks - 1
