"""`Oracle`: a drafter that knows the output and is wrong at a given rate; and engines that use it."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from inflight.engine.engine import Engine
from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import DraftTokens, Speculation
from inflight.speculation.drafter import NO_DRAFT
from inflight.speculation.step_times import StepTimes


class Oracle:
    """Drafts what the known sequences go on with.

    Args:
        known: prompt and output of sequences without speculation.
        share_right: of its tokens, the others being random.
    """

    def __init__(
        self, known: Sequence[Sequence[int]], vocab_size: int, share_right: float = 0.7, seed: int = 0
    ) -> None:
        self._by_beginning: defaultdict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
        for token_ids in known:
            self._by_beginning[tuple(token_ids[:4])].append(token_ids)
        self._vocab_size = vocab_size
        self._share_right = share_right
        self._rng = random.Random(seed)
        self.num_draft_tokens = 0

    def propose(self, candidate: Candidate) -> DraftTokens:
        so_far, most = list(candidate.token_ids), candidate.max_draft_tokens
        known = self._by_beginning[tuple(so_far[:4])]
        fitting = [each for each in known if list(each[: len(so_far)]) == so_far and len(each) > len(so_far)]
        coming = list(self._rng.choice(fitting)[len(so_far) :]) if fitting else []
        length = self._rng.choice([0, 1, 2, 3, most])
        coming += [self._rng.randrange(self._vocab_size) for _ in range(length)]
        draft = [
            each if self._rng.random() < self._share_right else self._rng.randrange(self._vocab_size)
            for each in coming[:length]
        ]
        self.num_draft_tokens += length
        return DraftTokens(draft, [1.0] * length) if draft else NO_DRAFT

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        pass


class Free(StepTimes):
    """Rows cost nothing, so all draft tokens are computed."""

    def __init__(self, seconds_of_step: float = 1.0) -> None:
        super().__init__()
        self._seconds_of_step = seconds_of_step

    def seconds(self, num_tokens: int) -> float:
        return self._seconds_of_step

    def knows(self, num_tokens: int) -> bool:
        return True


def make_rows_free(engine: Engine) -> None:
    """From now on the engine verifies every draft token of its own drafters, at any cost."""
    speculation = engine._speculation
    assert speculation is not None, engine.model_info.speculation
    speculation.times = Free()
    speculation._clock = lambda: 0.0
    if speculation._proposer is not None:
        speculation._proposer.times = Free(0.001)


def make_it_ask(engine: Engine, drafter: Oracle, max_draft_tokens: int = 16) -> None:
    """From now on the engine verifies every draft token of this drafter."""
    speculation = engine._speculation
    assert speculation is not None, engine.model_info.speculation
    speculation.__dict__.update(Speculation(drafter, max_draft_tokens, Free()).__dict__)
