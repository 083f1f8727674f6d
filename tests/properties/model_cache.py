"""`ModelCache` stands for the device: it writes what a plan says where the plan says, and reads each sequence's past
back through the plan's block tables: in each group as much of it as the span's first token sees.

A place holds content, not an owner: whoever finds the right token, at the right position, seen in the right way, may
use it, whoever computed it. A block that was let go too early, or shared with the wrong sequence, reads as another's.
"""

from array import array
from typing import TypeAlias

from inflight.contracts.plan import NO_BLOCK, StepPlan
from tests.properties.expected import Sizes

Place: TypeAlias = tuple[int, int, bool, str | None]
"""Position, token, whether computed as part of a long sequence (LongRoPE), cache salt; and in a group other than the
first that one's number."""

GARBAGE: Place = (-1, -1, False, "garbage")
"""What a step that went wrong leaves behind."""


def of_group(place: Place, group: int) -> Place:
    """What a token leaves in a group."""
    position, token, is_long, salt = place
    return position, token, is_long, f"{salt} in group {group}" if group else salt


class ModelCache:
    """For each place (block, offset) what was written there last."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.block_size = sizes.block_size
        self.places = [GARBAGE] * (sizes.num_blocks * sizes.block_size)

    def run(self, plan: StepPlan, pasts: list[list[Place]]) -> int:
        """Copy, write the tokens of all spans, then check that each span reads its own past, `pasts`, up to its end.

        Returns how many spans read what another one wrote in this very step.
        """
        self._copy(plan, [self._block(source) for source, _ in plan.copies])
        writers: dict[int, int] = {}
        for group, tables in enumerate(plan.tables):
            for index, (span, table) in enumerate(zip(plan.spans, tables, strict=True)):
                for position in range(span.start, span.end):
                    place = self.place(table, position)
                    assert place not in writers, "two spans write to the same place"
                    writers[place] = index
                    self.places[place] = of_group(pasts[index][position], group)
        sharing = set()
        for group, tables in enumerate(plan.tables):
            for index, (span, table) in enumerate(zip(plan.spans, tables, strict=True)):
                first = self.sizes.first_seen(group, span.start)
                assert self.read(table, first, span.end) == [of_group(p, group) for p in pasts[index][first : span.end]]
                if any(self.place(table, position) in writers for position in range(first, span.start)):
                    sharing.add(index)
        return len(sharing)

    def spoil(self, plan: StepPlan) -> None:
        """The step goes wrong: garbage wherever it was to copy or write to."""
        self._copy(plan, [[GARBAGE] * self.block_size] * len(plan.copies))
        for tables in plan.tables:
            for span, table in zip(plan.spans, tables, strict=True):
                for position in range(span.start, span.end):
                    self.places[self.place(table, position)] = GARBAGE

    def read(self, table: "array[int]", first: int, end: int) -> list[Place]:
        """What lies where a block table says for these positions."""
        return [self.places[self.place(table, position)] for position in range(first, end)]

    def place(self, table: "array[int]", position: int) -> int:
        """Where a token lies."""
        assert table[position // self.block_size] != NO_BLOCK
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _block(self, block: int) -> list[Place]:
        return self.places[block * self.block_size : (block + 1) * self.block_size]

    def _copy(self, plan: StepPlan, contents: list[list[Place]]) -> None:
        """All at once: what is copied was gathered before anything is written."""
        destinations = [destination for _, destination in plan.copies]
        assert len(destinations) == len(set(destinations)), "two copies to the same block"
        for destination, content in zip(destinations, contents, strict=True):
            self.places[destination * self.block_size : (destination + 1) * self.block_size] = content
