"""`GrammarMatcher`: where one sequence is in its grammar, and which tokens may come next.

Decides what ends a sequence: EOS may be chosen exactly where the grammar may end, whatever ids the model has for it.
Does not know what was asked, nor which step it takes part in.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from llguidance import LLExecutor, LLMatcher

from inflight.grammar.vocabulary import Vocabulary, Words


class GrammarError(RuntimeError):
    """A sequence's grammar cannot be followed any further: it became too complex, or nothing may come next."""


class GrammarMatcher:
    """Follows one sequence's output through its grammar. Not to be used by two threads at a time."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._num_tokens = 0  # accepted since it was made, EOS too
        self._is_ended = False  # by EOS, which the library is not told: it forgets it when it takes tokens back

    def clone(self) -> Self:
        """Another one at the same place, for another sequence."""
        twin = type(self)(self._vocabulary, self._matcher.deep_copy())
        twin._num_tokens, twin._is_ended = self._num_tokens, self._is_ended
        return twin

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing happens, if the grammar does not have it here.

        False, too, if the grammar cannot be followed any further; the next mask says why."""
        if self._is_ended:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            is_accepted = self._is_ended = self.may_stop
        else:
            is_accepted = self._vocabulary.has(token_id) and self._matcher.try_consume_tokens([token_id]) == 1
        self._num_tokens += is_accepted
        return is_accepted

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens. Raises `ValueError` if there were not so many."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be taken back; {self._num_tokens} were accepted")
        if num_tokens:
            self._matcher.rollback(num_tokens - self._is_ended)
            self._num_tokens -= num_tokens
            self._is_ended = False

    @property
    def may_stop(self) -> bool:
        """Whether the text so far is complete: the grammar may end here."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but EOS, or EOS was accepted. Costs no mask, so it may be known one late."""
        return self._is_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_mask(self, into: Words) -> None:
        """Write which tokens may come next, int32 words `[ceil(V / 32)]`. Raises `GrammarError`."""
        mask = np.empty(self._vocabulary.num_table_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        error = self._narrow(mask, into)
        if error is not None:
            raise error

    def _narrow(self, mask: Words, into: Words) -> GrammarError | None:
        """Write what of the library's mask may be chosen: nothing, if there is an error."""
        if self._matcher.is_error():
            into[:] = 0
            return GrammarError(f"the grammar cannot be followed any further: {reason(self._matcher)}")
        vocabulary = self._vocabulary
        np.bitwise_and(mask[: vocabulary.num_words], vocabulary.tokens, out=into)
        if self.may_stop:
            into |= vocabulary.eos
        return None if into.any() else GrammarError("the grammar lets no token of this model's come next")


def fill_masks(matchers: Sequence[GrammarMatcher], into: Words, executor: LLExecutor) -> list[GrammarError | None]:
    """Write which tokens may come next in each of several different sequences, int32 `[len(matchers), ceil(V / 32)]`.

    The interpreter's lock is not held meanwhile. Returns each one's error; such a one's row allows nothing."""
    if not matchers:
        return []
    masks = np.empty((len(matchers), matchers[0]._vocabulary.num_table_words), dtype=np.int32)
    tasks = [(each._matcher, row) for row, each in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(tasks, masks.ctypes.data, masks.strides[0], len(matchers))
    return [each._narrow(mask, row) for each, mask, row in zip(matchers, masks, into, strict=True)]


def reason(matcher: LLMatcher) -> str:
    """Why the library gave up, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split()) or "no reason is known"
