"""`WaitingQueue`: who is next. Decides the order in which sequences are served, and nothing else.

Effective priority = priority - floor(steps waited / aging_steps); lower comes first, and of equals who came first. So
nobody waits for ever behind better ones that keep coming. The steps waited by step `now` are `now - since`, and among
sequences with equal `since % aging_steps` the floor differs only by a constant: each such residue keeps a heap whose
order never changes, and the best of all is the best of their heads.
"""

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from inflight.scheduling.sequence import Sequence

Entry: TypeAlias = tuple[int, int, int]
"""(priority + since // aging_steps, sequence id, since): what orders the sequences of one residue, best first."""

MOST_STALE = 64
"""So many entries of sequences that have left may stay in the heaps, besides one for each that waits."""


class WaitingQueue:
    """Waiting sequences, best first.

    Args:
        aging_steps: a waiting sequence gains one priority for each so many steps; None: priorities don't count at all,
            who came first is first.
    """

    def __init__(self, aging_steps: int | None) -> None:
        self.aging_steps = aging_steps
        self._waiting: dict[int, Sequence] = {}
        self._since: dict[int, int] = {}  # the step from which each would have waited without a break
        self._heaps: dict[int, list[Entry]] = {}  # by residue; those who have left are dropped when they come up
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order."""
        return iter(self._waiting.values())

    def get(self, sequence_id: int) -> Sequence | None:
        """The waiting sequence of this id."""
        return self._waiting.get(sequence_id)

    def push(self, sequence: Sequence, now: int) -> None:
        """Let a sequence wait from step `now` on; what it has waited before counts."""
        self._waiting[sequence.sequence_id] = sequence
        self._since[sequence.sequence_id] = now - sequence.num_steps_waited
        self._enter(sequence)

    def best(self, now: int) -> Sequence | None:
        """Who is to be served first in step `now`."""
        heads = []
        for residue, heap in list(self._heaps.items()):
            while heap and self._since.get(heap[0][1]) != heap[0][2]:
                heapq.heappop(heap)
                self._num_entries -= 1
            if not heap:
                del self._heaps[residue]
                continue
            aged = 0 if self.aging_steps is None else (now - residue) // self.aging_steps
            heads.append((heap[0][0] - aged, heap[0][1]))
        return self._waiting[min(heads)[1]] if heads else None

    def remove(self, sequence: Sequence, now: int) -> None:
        """Take a sequence out; the steps that it has waited are its own now."""
        del self._waiting[sequence.sequence_id]
        sequence.num_steps_waited = now - self._since.pop(sequence.sequence_id)
        if self._num_entries > 2 * len(self._waiting) + MOST_STALE:
            self._heaps.clear()
            self._num_entries = 0
            for each in self._waiting.values():
                self._enter(each)

    def effective_priority(self, sequence: Sequence, now: int) -> int:
        """Of any sequence, waiting or not; the same for all where priorities don't count."""
        if self.aging_steps is None:
            return 0
        since = self._since.get(sequence.sequence_id)
        waited = sequence.num_steps_waited if since is None else now - since
        return sequence.request.priority - waited // self.aging_steps

    def _enter(self, sequence: Sequence) -> None:
        since = self._since[sequence.sequence_id]
        quotient, residue = (0, 0) if self.aging_steps is None else divmod(since, self.aging_steps)
        priority = 0 if self.aging_steps is None else sequence.request.priority
        heapq.heappush(self._heaps.setdefault(residue, []), (priority + quotient, sequence.sequence_id, since))
        self._num_entries += 1
