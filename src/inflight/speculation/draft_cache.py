"""`DraftCache`: tracks the content of a draft model's KV cache.

The draft model has its own cache, with the target model's block numbers (and as many more for each further cache
group). So it needs no block tables of its own: blocks shared, forked, preempted or evicted there are so here. It only
records the computed tokens: for each place, a hash of all tokens up to the one whose keys and values are there.

Draft tokens beyond a sequence's blocks go to spare blocks of its slot.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.contracts.step.plan import BlockTable
from inflight.scheduling.draft_tokens import Candidate


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The layout of a draft model's cache.

    Attributes:
        group: the target model's cache group whose block numbers are used; it keeps all tokens.
        num_blocks: the model's blocks; each cache group of the draft model has more, see `num_draft_blocks`.
        max_draft_tokens: of a sequence in one step.
    """

    group: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_draft_tokens: int

    @property
    def num_spare_blocks(self) -> int:
        """Blocks of each slot for draft tokens."""
        return -(-self.max_draft_tokens // self.block_size)

    @property
    def num_draft_blocks(self) -> int:
        """The target model's blocks, and the spare ones."""
        return self.num_blocks + self.max_num_seqs * self.num_spare_blocks


class DraftCache:
    """The hashes of the draft model's computed tokens, by block."""

    def __init__(self, layout: DraftLayout) -> None:
        self.layout = layout
        self._hashes = np.zeros((layout.num_draft_blocks, layout.block_size), dtype=np.int64)  # 0: empty

    def table(self, candidate: Candidate) -> BlockTable:
        """A candidate's blocks in the first cache group, and after them the spare ones of its slot."""
        layout = self.layout
        first = layout.num_blocks + candidate.slot * layout.num_spare_blocks
        spare = array("i", range(first, first + layout.num_spare_blocks))
        return candidate.block_tables[layout.group] + spare

    def in_group(self, table: BlockTable, group: int) -> BlockTable:
        """The same blocks in another cache group."""
        if group == 0:
            return table
        return array("i", (np.frombuffer(table, dtype=np.int32) + group * self.layout.num_draft_blocks).tobytes())

    def num_seen(self, table: BlockTable, hashes: Sequence[int]) -> int:
        """The number of a sequence's first tokens that are computed.

        Args:
            hashes: of each token and all before it (see `extend`).
        """
        size = self.layout.block_size
        blocks = np.frombuffer(table, dtype=np.int32)[: -(-len(hashes) // size)]
        different = self._hashes[blocks].reshape(-1)[: len(hashes)] != np.asarray(hashes, dtype=np.int64)
        return int(different.argmax()) if different.any() else len(hashes)

    def observe(self, table: BlockTable, hashes: Sequence[int], start: int, end: int, num_lasting: int) -> None:
        """The tokens `[start, end)` of a sequence were computed; those from `num_lasting` on must be recomputed."""
        size = self.layout.block_size
        positions = np.arange(start, end)
        blocks = np.frombuffer(table, dtype=np.int32)[positions // size]
        self._hashes[blocks, positions % size] = np.where(positions < num_lasting, hashes[start:end], 0)


def extend(hashes: "array[int]", token_ids: Iterable[int]) -> None:
    """Add the hashes of tokens that follow."""
    last = hashes[-1] if hashes else 0
    for token_id in token_ids:
        last = hash((last, token_id)) or 1
        hashes.append(last)
