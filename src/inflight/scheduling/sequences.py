"""`Sequences`: a scheduler's unfinished sequences, waiting and running, and their slots.

Waiting sequences are in one heap per residue of the service order, so that ten thousand of them cost a step nothing.
"""

import heapq
from collections.abc import Iterable, Iterator
from heapq import nsmallest
from typing import TypeAlias

from inflight.contracts.api.config import BACKGROUND
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.sequence import Request, Sequence

Rank: TypeAlias = tuple[int, int]
"""(priority, sequence id): the smaller is served first."""

_IN_BACKGROUND = -1
"""The residue of all background sequences: their order never changes."""


class ServiceOrder:
    """The order in which sequences are served; they are preempted in reverse.

    Background sequences come after all others. Among the others, effective priority = priority - floor(steps since
    arrival / aging_steps); lower is served first, equals in order of arrival. So no sequence starves while others keep
    coming. Steps count from arrival, also while a sequence runs: a later one of no better priority never overtakes it.

    Args:
        aging_steps: steps after which a sequence gains one priority; None: first come, first served.
    """

    def __init__(self, aging_steps: int | None) -> None:
        self._aging_steps = aging_steps

    def effective_priority(self, sequence: Sequence, now: int) -> int:
        """A sequence's priority in step `now`; 0 without priorities, except in the background."""
        if sequence.is_background:
            return BACKGROUND
        if self._aging_steps is None:
            return 0
        return sequence.request.priority - (now - sequence.arrival) // self._aging_steps

    def rank(self, sequence: Sequence, now: int) -> Rank:
        """A sequence's rank in step `now`."""
        return self.effective_priority(sequence, now), sequence.sequence_id

    # Written out, floor((now - arrival) / aging_steps) differs among sequences of equal `arrival % aging_steps` only by
    # a constant. Within such a residue the order therefore never changes.

    def fixed_rank(self, sequence: Sequence) -> tuple[int, Rank]:
        """A sequence's residue, and its constant rank within that residue."""
        if sequence.is_background:
            return _IN_BACKGROUND, (BACKGROUND, sequence.sequence_id)
        if self._aging_steps is None:
            return 0, (0, sequence.sequence_id)
        quotient, residue = divmod(sequence.arrival, self._aging_steps)
        return residue, (sequence.request.priority + quotient, sequence.sequence_id)

    def rank_at(self, residue: int, fixed_rank: Rank, now: int) -> Rank:
        """The rank in step `now` of a sequence with this `fixed_rank`."""
        if self._aging_steps is None or residue == _IN_BACKGROUND:
            return fixed_rank
        return fixed_rank[0] - (now - residue) // self._aging_steps, fixed_rank[1]


MAX_STALE = 64
"""Stale entries allowed in the heaps, besides one for each waiting sequence."""


class WaitingQueue:
    """Waiting sequences.

    Args:
        order: the service order.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._waiting: dict[int, Sequence] = {}
        self._heaps: dict[int, list[Rank]] = {}  # by residue; stale entries are dropped when they come up
        self._num_entries = 0
        self.num_in_background = 0
        """The number of background sequences."""

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
        """Remove a sequence."""
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


NO_SEQUENCE = -1


class Slots:
    """The slots of one scheduler. The lowest free one is taken first, so that used slots stay dense."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))  # a heap
        self._released = set[int]()  # since the last plan
        self._told = [NO_SEQUENCE] * num_slots

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """A free slot."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        heapq.heappush(self._free, slot)
        self._released.add(slot)
        self._told[slot] = NO_SEQUENCE

    def is_new(self, slot: int, sequence_id: int) -> bool:
        """Whether no plan has announced yet that the sequence has the slot; marks it as announced."""
        if self._told[slot] == sequence_id:
            return False
        self._told[slot] = sequence_id
        return True

    def take_released(self) -> tuple[int, ...]:
        """Return the slots freed since the last call, for a plan to announce."""
        released = tuple(sorted(self._released))
        self._released.clear()
        return released

    def undo(self, assigned: Iterable[int], released: Iterable[int]) -> None:
        """A plan that announced these slots did not run."""
        self._released.update(released)
        for slot in assigned:
            self._told[slot] = NO_SEQUENCE


class Sequences:
    """Unfinished sequences. Parked ones are in neither group.

    Args:
        order: the service order.

    Attributes:
        waiting: those without a slot, except parked ones.
        running: those with a slot, by id.
        of_request: a request's sequences, by its id and theirs.
    """

    def __init__(self, order: ServiceOrder, num_slots: int) -> None:
        self.order = order
        self.slots = Slots(num_slots)
        self.waiting = WaitingQueue(order)
        self.running: dict[int, Sequence] = {}
        self.of_request: dict[str, dict[int, Sequence]] = {}
        self._next_id = 0

    def make(self, request: Request, now: int, block_pool: BlockPool) -> list[Sequence]:
        """Add the sequences of a new request, which arrives in step `now`; they are not queued yet."""
        made = self.of_request[request.request_id] = {}
        for index in range(request.num_sequences):
            tables, token_ids = block_pool.new_tables(), list(request.prompt_token_ids)
            made[self._next_id] = Sequence(self._next_id, request, index, token_ids, now, tables)
            self._next_id += 1
        return list(made.values())

    def in_service_order(self, group: Iterable[Sequence], now: int) -> list[Sequence]:
        """Sequences in service order at step `now`."""
        return sorted(group, key=lambda sequence: self.order.rank(sequence, now))

    def first(self, number: int, group: Iterable[Sequence], now: int) -> list[Sequence]:
        """The first in this order."""
        return nsmallest(number, group, key=lambda sequence: self.order.rank(sequence, now))

    def start(self, sequence: Sequence, slot: int | None = None) -> None:
        """Move a waiting sequence to a slot, which an ended one had until now; None: to a free one."""
        self.waiting.remove(sequence)
        sequence.slot = self.slots.take() if slot is None else slot
        self.running[sequence.sequence_id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """Remove a finished sequence."""
        request_id = sequence.request.request_id
        del self.of_request[request_id][sequence.sequence_id]
        if not self.of_request[request_id]:
            del self.of_request[request_id]

    def siblings_of(self, sequence: Sequence) -> Iterator[Sequence]:
        """The other running sequences of its request whose blocks it can share."""
        request = sequence.request
        if request.num_sequences == 1:
            return
        of_request = self.of_request[request.request_id]
        for other in (of_request if len(of_request) < len(self.running) else self.running).values():
            is_running = other.slot is not None and other is not sequence
            if is_running and other.request is request and other.root == sequence.root:
                yield other

    def for_request(self, request_id: str) -> list[Sequence]:
        """A request's unfinished sequences; none if it is unknown."""
        return list(self.of_request.get(request_id, {}).values())
