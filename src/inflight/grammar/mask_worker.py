"""`MaskWorker`: computes a step's masks while its forward pass runs.

The library's threads compute, started from one thread of ours.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from llguidance import LLExecutor

from inflight.grammar.matcher import GrammarError, GrammarMatcher, fill_masks
from inflight.grammar.vocabulary import Words, num_words


@dataclass(frozen=True, slots=True, eq=False)
class StepMasks:
    """The masks of a step's constrained sequences, in the order of their matchers.

    Attributes:
        words: int32 `[rows, ceil(V / 32)]`, one bit for each allowed token, the lowest first.
        errors: errors by row; such a row allows no token, and affects only its own sequence.
    """

    words: Words
    errors: dict[int, GrammarError]


MaskHandle: TypeAlias = "Future[StepMasks]"
"""Masks that are being computed; `result` waits for them."""


class MaskWorker:
    """Computes masks in the background.

    Args:
        vocab_size: the width of the logits, V.
        num_threads: the number of concurrent masks.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._num_words = num_words(vocab_size)
        self._executor = LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inflight-masks")

    def start(self, matchers: Sequence[GrammarMatcher]) -> MaskHandle:
        """Start computing. Each matcher may appear only once, and must not be used until the result is ready."""
        return self._thread.submit(self._compute, list(matchers))

    def stop(self) -> None:
        """Finish started work and end the threads."""
        self._thread.shutdown()

    def _compute(self, matchers: list[GrammarMatcher]) -> StepMasks:
        words = np.empty((len(matchers), self._num_words), dtype=np.int32)
        try:
            errors = fill_masks(matchers, words, self._executor)
        except BaseException as failure:  # the library's panics are `BaseException`s; other sequences must continue
            words[:] = 0
            errors = [GrammarError(f"the masks could not be computed: {failure!r}")] * len(matchers)
        return StepMasks(words, {row: error for row, error in enumerate(errors) if error is not None})
