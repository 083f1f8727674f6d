"""`WaitingQueue`: who is next. Decides the order in which sequences are served, and nothing else.

Effective priority = priority - floor(steps waited / aging_steps); lower comes first, and of equals who came first. So
nobody waits for ever behind better ones that keep coming. Steps are counted from a sequence's arrival on, also while it
runs: one that came later and is not better can never catch up with it and take its place.

Written out, floor((now - arrival) / aging_steps) differs among sequences with equal `arrival % aging_steps` only by a
constant: each such residue keeps a heap whose order never changes, and the best of all is the best of their heads.
"""

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from inflight.scheduling.sequence import Sequence

Entry: TypeAlias = tuple[int, int]
"""(priority + arrival // aging_steps, sequence id): what orders the sequences of one residue, best first."""

MOST_STALE = 64
"""So many entries of sequences that have left may stay in the heaps, besides one for each that waits."""


class WaitingQueue:
    """Waiting sequences, best first.

    Args:
        aging_steps: a sequence gains one priority for each so many steps; None: priorities don't count at all, who came
            first is first.
    """

    def __init__(self, aging_steps: int | None) -> None:
        self.aging_steps = aging_steps
        self._waiting: dict[int, Sequence] = {}
        self._heaps: dict[int, list[Entry]] = {}  # by residue; those who have left are dropped when they come up
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order."""
        return iter(self._waiting.values())

    def get(self, sequence_id: int) -> Sequence | None:
        """The waiting sequence of this id."""
        return self._waiting.get(sequence_id)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._waiting[sequence.sequence_id] = sequence
        self._enter(sequence)

    def best(self, now: int) -> Sequence | None:
        """Who is to be served first in step `now`."""
        heads = []
        for residue, heap in list(self._heaps.items()):
            while heap and heap[0][1] not in self._waiting:
                heapq.heappop(heap)
                self._num_entries -= 1
            if not heap:
                del self._heaps[residue]
                continue
            aged = 0 if self.aging_steps is None else (now - residue) // self.aging_steps
            heads.append((heap[0][0] - aged, heap[0][1]))
        return self._waiting[min(heads)[1]] if heads else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        del self._waiting[sequence.sequence_id]
        if self._num_entries > 2 * len(self._waiting) + MOST_STALE:
            self._heaps.clear()
            self._num_entries = 0
            for each in self._waiting.values():
                self._enter(each)

    def effective_priority(self, sequence: Sequence, now: int) -> int:
        """Of any sequence, waiting or not; the same for all where priorities don't count."""
        if self.aging_steps is None:
            return 0
        return sequence.request.priority - (now - sequence.arrival) // self.aging_steps

    def _enter(self, sequence: Sequence) -> None:
        priority = quotient = residue = 0
        if self.aging_steps is not None:
            priority = sequence.request.priority
            quotient, residue = divmod(sequence.arrival, self.aging_steps)
        heapq.heappush(self._heaps.setdefault(residue, []), (priority + quotient, sequence.sequence_id))
        self._num_entries += 1
