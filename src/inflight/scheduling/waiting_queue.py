"""`WaitingQueue`: the sequences without a slot, and the best of them at any step.

Each residue of the service order has a heap whose order never changes; the best of all sequences is the best of the
heaps' heads. So ten thousand waiting sequences cost a step nothing.
"""

import heapq
from collections.abc import Iterator

from inflight.scheduling.sequence import Sequence
from inflight.scheduling.service_order import Rank, ServiceOrder

MAX_STALE = 64
"""How many entries of sequences that have left may stay in the heaps, besides one for each that waits."""


class WaitingQueue:
    """Waiting sequences.

    Args:
        order: which of them is served first.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._waiting: dict[int, Sequence] = {}
        self._heaps: dict[int, list[Rank]] = {}  # by residue; entries of sequences that left go when they come up
        self._num_entries = 0
        self.num_in_background = 0
        """How many of them are in the background."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order."""
        return iter(self._waiting.values())

    def get(self, sequence_id: int) -> Sequence | None:
        """The waiting sequence of this id."""
        return self._waiting.get(sequence_id)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._waiting[sequence.sequence_id] = sequence
        self.num_in_background += sequence.is_background
        self._enter(sequence)

    def best(self, now: int) -> Sequence | None:
        """The sequence to serve first in step `now`."""
        heads = []
        for residue, heap in list(self._heaps.items()):
            while heap and heap[0][1] not in self._waiting:
                heapq.heappop(heap)
                self._num_entries -= 1
            if heap:
                heads.append(self._order.rank_at(residue, heap[0], now))
            else:
                del self._heaps[residue]
        return self._waiting[min(heads)[1]] if heads else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        del self._waiting[sequence.sequence_id]
        self.num_in_background -= sequence.is_background
        if self._num_entries > 2 * len(self._waiting) + MAX_STALE:
            self._heaps.clear()
            self._num_entries = 0
            for each in self._waiting.values():
                self._enter(each)

    def _enter(self, sequence: Sequence) -> None:
        residue, rank = self._order.fixed_rank(sequence)
        heapq.heappush(self._heaps.setdefault(residue, []), rank)
        self._num_entries += 1
