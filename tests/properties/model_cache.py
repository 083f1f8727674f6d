"""`ModelCache` models the device: it writes the content of a plan where the plan says, and reads each sequence's past
back through the plan's block tables, in each group as much as the span's first token sees.

A place holds content and has no owner: any sequence may use a place with the right token, position and kind of view, no
matter which sequence computed it. A block that was released too early, or shared with the wrong sequence, has the
content of another sequence.
"""

from array import array
from typing import TypeAlias

from inflight.contracts.step.plan import NO_BLOCK, StepPlan
from tests.properties.expected import Sizes

Place: TypeAlias = tuple[int, int, bool, str | None]
"""Position, token, whether computed as part of a long sequence (LongRoPE), cache salt; except in the first group, also
the group's number."""

GARBAGE: Place = (-1, -1, False, "garbage")
"""The content that a failed step leaves behind."""


def of_group(place: Place, group: int) -> Place:
    """The content that a token writes in a group."""
    position, token, is_long, salt = place
    return position, token, is_long, f"{salt} in group {group}" if group else salt


class ModelCache:
    """The last content written to each place (block, offset)."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.block_size = sizes.block_size
        self.places = [GARBAGE] * (sizes.num_blocks * sizes.block_size)

    def run(self, plan: StepPlan, pasts: list[list[Place]]) -> int:
        """Copy, write the tokens of all spans, then check that each span reads its own past, `pasts`, up to its end.

        Returns how many spans read content that another span wrote in the same step.
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
        """Fail the step: write garbage to every place that it would copy or write to."""
        self._copy(plan, [[GARBAGE] * self.block_size] * len(plan.copies))
        for tables in plan.tables:
            for span, table in zip(plan.spans, tables, strict=True):
                for position in range(span.start, span.end):
                    self.places[self.place(table, position)] = GARBAGE

    def read(self, table: "array[int]", first: int, end: int) -> list[Place]:
        """Read the content of these positions through a block table."""
        return [self.places[self.place(table, position)] for position in range(first, end)]

    def place(self, table: "array[int]", position: int) -> int:
        """The place of a token."""
        assert table[position // self.block_size] != NO_BLOCK
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _block(self, block: int) -> list[Place]:
        return self.places[block * self.block_size : (block + 1) * self.block_size]

    def _copy(self, plan: StepPlan, contents: list[list[Place]]) -> None:
        """Copy all blocks at once: read every source before any write."""
        destinations = [destination for _, destination in plan.copies]
        assert len(destinations) == len(set(destinations)), "two copies to the same block"
        for destination, content in zip(destinations, contents, strict=True):
            self.places[destination * self.block_size : (destination + 1) * self.block_size] = content
