"""`GrammarMatcher`: the state of one sequence in its grammar.

EOS, with any of the model's ids, is allowed exactly where the grammar may end. Knows neither the request nor the
current step.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Self

import numpy as np
from llguidance import LLExecutor, LLMatcher

from inflight.grammar.vocabulary import Vocabulary, Words


class GrammarError(RuntimeError):
    """A sequence's grammar became too complex, or allows no next token."""


class GrammarMatcher:
    """Tracks one sequence's output in its grammar. Not thread-safe.

    Lookahead (`num_allowed`, `forced`) uses a copy, which takes microseconds: the library's queries may change its
    state, or even make it fail.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._is_ended = False  # by EOS, which is hidden from the library

    def clone(self) -> Self:
        """Return a matcher in the same state, for another sequence."""
        proxy = type(self)(self._vocabulary, self._matcher.deep_copy())
        proxy._is_ended = self._is_ended
        return proxy

    def accept(self, token_id: int) -> bool:
        """Advance by one token; return False, without effect, if the grammar does not allow it.

        Also returns False if the grammar cannot be followed any further; the next mask says why."""
        if self._is_ended:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._is_ended = self.may_stop
            return self._is_ended
        return self._vocabulary.has(token_id) and self._matcher.try_consume_tokens([token_id]) == 1

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens, from the first, that the grammar allows next, without EOS; does not advance."""
        if self._is_ended:
            return 0
        known = list(takewhile(self._vocabulary.has, token_ids))
        return self._matcher.deep_copy().validate_tokens(known) if known else 0

    def forced(self) -> list[int]:
        """The forced next text, if any, as the tokenizer splits it; does not advance. Other tokens that spell the same
        text are also allowed."""
        if self._is_ended or self._matcher.is_stopped():
            return []
        matcher = self._matcher.deep_copy()
        if not matcher.compute_ff_bytes():
            return []
        return list(takewhile(self._vocabulary.has, matcher.compute_ff_tokens()))

    @property
    def may_stop(self) -> bool:
        """Whether the text so far is complete: the grammar may end here."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether only EOS may follow, or EOS was accepted. Computed without a mask, so it may become True one token
        late."""
        return self._is_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_mask(self, into: Words) -> None:
        """Write the mask of allowed tokens into int32 words `[ceil(V / 32)]`. Raises `GrammarError`."""
        mask = np.empty(self._vocabulary.num_table_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        error = self._narrow(mask, into)
        if error is not None:
            raise error

    def _narrow(self, mask: Words, into: Words) -> GrammarError | None:
        """Write the allowed part of the library's mask into `[ceil(V / 32)]` words; no token if there is an error."""
        if self._matcher.is_error():
            into[:] = 0
            return GrammarError(f"the grammar cannot be followed any further: {reason(self._matcher)}")
        vocabulary = self._vocabulary
        np.bitwise_and(mask[: vocabulary.num_words], vocabulary.tokens, out=into)
        if self.may_stop:
            into |= vocabulary.eos
        return None if into.any() else GrammarError("the grammar lets no token of this model's come next")


def fill_masks(matchers: Sequence[GrammarMatcher], into: Words, executor: LLExecutor) -> list[GrammarError | None]:
    """Write which tokens may come next in several different sequences, int32 `[len(matchers), ceil(V / 32)]`.

    Releases the interpreter's lock meanwhile. Returns each matcher's error; a row with an error allows no token."""
    if not matchers:
        return []
    masks = np.empty((len(matchers), matchers[0]._vocabulary.num_table_words), dtype=np.int32)
    tasks = [(each._matcher, row) for row, each in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(tasks, masks.ctypes.data, masks.strides[0], len(matchers))
    return [each._narrow(mask, row) for each, mask, row in zip(matchers, masks, into, strict=True)]


def reason(matcher: LLMatcher) -> str:
    """Return why the library gave up, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split()) or "no reason is known"
