"""`ModelCache` stands for the device: it writes what a plan says where the plan says, and reads each sequence's past
back through the plan's block table.

A place holds content, not an owner: whoever finds the right token, at the right position, seen in the right way, may
use it, whoever computed it. A block that was let go too early, or shared with the wrong sequence, reads as another's.
"""

from array import array
from typing import TypeAlias

from inflight.plan import StepPlan

Place: TypeAlias = tuple[int, int, bool, str | None]
"""Position, token, whether computed as part of a long sequence (LongRoPE), cache salt."""

GARBAGE: Place = (-1, -1, False, "garbage")
"""What a step that went wrong leaves behind."""


class ModelCache:
    """For each place (block, offset) what was written there last."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.places = [GARBAGE] * (num_blocks * block_size)

    def run(self, plan: StepPlan, pasts: list[list[Place]]) -> int:
        """Copy, write the tokens of all spans, then check that each span reads its own past, `pasts`, up to its end.

        Returns how many spans read what another one wrote in this very step.
        """
        self._copy(plan, [self._block(source) for source, _ in plan.copies])
        writers: dict[int, int] = {}
        for index, (span, table) in enumerate(zip(plan.spans, plan.tables[0], strict=True)):
            for position in range(span.start, span.end):
                place = self.place(table, position)
                assert place not in writers, "two spans write to the same place"
                writers[place] = index
                self.places[place] = pasts[index][position]
        num_sharing = 0
        for index, (span, table) in enumerate(zip(plan.spans, plan.tables[0], strict=True)):
            assert self.read(table, span.end) == pasts[index][: span.end]
            num_sharing += any(self.place(table, position) in writers for position in range(span.start))
        return num_sharing

    def spoil(self, plan: StepPlan) -> None:
        """The step goes wrong: garbage wherever it was to copy or write to."""
        self._copy(plan, [[GARBAGE] * self.block_size] * len(plan.copies))
        for span, table in zip(plan.spans, plan.tables[0], strict=True):
            for position in range(span.start, span.end):
                self.places[self.place(table, position)] = GARBAGE

    def read(self, table: "array[int]", num_tokens: int) -> list[Place]:
        """The first `num_tokens` places of a block table."""
        flat = [place for block in table for place in self._block(block)]
        assert len(flat) >= num_tokens
        return flat[:num_tokens]

    def place(self, table: "array[int]", position: int) -> int:
        """Where a token lies."""
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _block(self, block: int) -> list[Place]:
        return self.places[block * self.block_size : (block + 1) * self.block_size]

    def _copy(self, plan: StepPlan, contents: list[list[Place]]) -> None:
        """All at once: what is copied was gathered before anything is written."""
        destinations = [destination for _, destination in plan.copies]
        assert len(destinations) == len(set(destinations)), "two copies to the same block"
        for destination, content in zip(destinations, contents, strict=True):
            self.places[destination * self.block_size : (destination + 1) * self.block_size] = content
