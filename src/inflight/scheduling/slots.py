"""`Slots`: which sequence has which, and what plans have told the runner of that."""

import heapq
from collections.abc import Iterable

NO_SEQUENCE = -1


class Slots:
    """The slots of one scheduler. The lowest free one is taken first, so lanes stay together."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))  # a heap
        self._released = set[int]()  # since the last plan
        self._told = [NO_SEQUENCE] * num_slots

    @property
    def num_free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """A slot is free again."""
        heapq.heappush(self._free, slot)
        self._released.add(slot)
        self._told[slot] = NO_SEQUENCE

    def is_news(self, slot: int, sequence_id: int) -> bool:
        """Whether no plan has told yet that the sequence has the slot. The plan that asks does."""
        if self._told[slot] == sequence_id:
            return False
        self._told[slot] = sequence_id
        return True

    def take_released(self) -> tuple[int, ...]:
        """The slots that were given back since this was last asked, for a plan to tell of."""
        released = tuple(sorted(self._released))
        self._released.clear()
        return released

    def tell_again(self, assigned: Iterable[int], released: Iterable[int]) -> None:
        """A plan has told of these slots to nobody."""
        self._released.update(released)
        for slot in assigned:
            self._told[slot] = NO_SEQUENCE
