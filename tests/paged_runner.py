"""A runner without a model: it stores tokens where a plan says, and chooses each next token by what it reads back.

A block that was released too early, shared with the wrong sequence, or left to another slot gives wrong tokens.
"""

from itertools import zip_longest
from typing import Any

from inflight.contracts.step.plan import SpanTokens, StepPlan, StepTokens

NUM_TOKENS = 97
"""The tokens that are chosen lie below this."""


def next_token(index: int, token_ids: list[int]) -> int:
    """The token that comes after these in a request's sequence number `index`."""
    value = index + 1
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % NUM_TOKENS


def output_of(index: int, prompt: list[int], num_tokens: int) -> list[int]:
    """What a sequence generates when it runs alone."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(index, token_ids))
    return token_ids[len(prompt) :]


class PagedRunner:
    """Stands in for `ModelRunner.run`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.places: dict[int, int] = {}
        self.indices: dict[int, int] = {}

    def run(self, plan: StepPlan, masks: Any = None) -> StepTokens:
        """Run one step."""
        for slot in plan.released_slots:
            self.indices.pop(slot, None)
        for assignment in plan.assignments:
            self.indices[assignment.slot] = assignment.index
        size = self.block_size
        copied = [[self.places.get(source * size + offset, -1) for offset in range(size)] for source, _ in plan.copies]
        for (_, destination), content in zip(plan.copies, copied, strict=True):
            self.places.update((destination * size + offset, token_id) for offset, token_id in enumerate(content))
        spans = list(zip(plan.spans, plan.tables[0] if plan.tables else (), strict=True))
        for span, table in spans:
            for position, token_id in enumerate(span.token_ids, span.start):
                self.places[table[position // size] * size + position % size] = token_id
        given = []
        for span, table in spans:
            read = [self.places[table[position // size] * size + position % size] for position in range(span.end)]
            chosen: list[int] = []
            ends = range(span.end - span.num_draft_tokens, span.end + 1) if span.num_logit_rows else ()
            for end, proposed in zip_longest(ends, span.draft_token_ids):
                chosen.append(next_token(self.indices[span.slot], read[:end]))
                if proposed != chosen[-1]:
                    break
            given.append(SpanTokens(chosen, True, (), ()))
        return given
