"""`RandomSpeculator`: draft tokens of few tokens, so that many are right, and often more than there is room for."""

import random
from collections.abc import Sequence

from inflight.scheduling.draft_tokens import Candidate

NUM_TOKENS = 3


class RandomSpeculator:
    """A speculator that knows nothing and respects no limit."""

    max_draft_tokens = 1000
    is_ready = True

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(
        self, candidates: Sequence[Candidate], num_tokens: int, num_sequences: int, budget: int
    ) -> list[list[int]]:
        assert candidates
        assert budget > 0
        assert num_sequences >= 0
        assert all(each.max_draft_tokens > 0 for each in candidates)
        lengths = [self._rng.choice([0, 1, 2, 3, each.max_draft_tokens, budget + 1]) for each in candidates]
        return [[self._rng.randrange(NUM_TOKENS) for _ in range(length)] for length in lengths]
