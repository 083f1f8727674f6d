"""`Constraints`: tracks an engine's sequences with a grammar.

A sequence's matcher advances when its next step begins, by its tokens so far, and never by tokens of a discarded step.
Rows after a draft token are masked by a copy of the matcher that has accepted it. Masks are computed in the background,
between the plan of a step and their first use.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan
from inflight.execution.sampling.sampler import TokenMasks
from inflight.grammar.compiler import GrammarCompiler
from inflight.grammar.mask_worker import MaskHandle, MaskWorker
from inflight.grammar.matcher import GrammarMatcher
from inflight.text.tokenizer import Tokenizer

MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Pending masks for some `rows` of a step's logits."""

    rows: list[int]
    handle: MaskHandle

    def result(self) -> TokenMasks:
        """Wait for the masks. The mask of a row with a failed grammar allows no token."""
        return TokenMasks(self.rows, self.handle.result().words)


@dataclass(slots=True)
class _TrackedSequence:
    """A sequence's matcher, and the number of output tokens accepted."""

    matcher: GrammarMatcher
    num_tokens: int = 0

    def catch_up(self, output: Sequence[int]) -> GrammarMatcher:
        for token_id in output[self.num_tokens :]:
            self.matcher.accept(token_id)
        self.num_tokens = len(output)
        return self.matcher


class Constraints:
    """Matchers by sequence id.

    Args:
        tokenizer: None: nothing can be constrained.
        model_info: describes the model whose logits are masked.
    """

    def __init__(self, tokenizer: Tokenizer | None, model_info: ModelInfo) -> None:
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            self._compiler = GrammarCompiler(tokenizer, model_info.vocab_size, model_info.eos_token_ids)
        self._model_info = model_info
        self._matchers: dict[int, _TrackedSequence] = {}
        self._pending: MaskHandle | None = None
        self._sequence_ids: list[int] = []  # the sequence of each of the pending masks

    def compile(self, params: SamplingParams) -> GrammarMatcher | None:
        """Return a matcher for a request's sequences; None if the request has no structured output. Thread-safe.

        Raises `InvalidRequestError` if the structured output cannot be enforced."""
        output = params.structured_output
        if output is None:
            return None
        if self._compiler is None:
            raise InvalidRequestError("structured output needs a tokenizer, and this model has none")
        if not self._model_info.eos_token_ids:
            raise InvalidRequestError("structured output ends with an EOS token, and this model has none")
        for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids", "bad_words"):
            if getattr(params, name) and output.kind != "reasoning":
                raise InvalidRequestError(
                    f"{name} is {getattr(params, name)!r}; it cannot be combined with structured output, which ends "
                    "only where its grammar ends"
                )
        try:
            return self._compiler.compile(output)
        except (InvalidRequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are `BaseException`s
            raise InvalidRequestError(f"the structured output cannot be compiled: {error!r}") from error

    def add(self, sequence_id: int, matcher: GrammarMatcher) -> None:
        """Constrain a sequence from its first token on; do nothing if it is already constrained."""
        if sequence_id not in self._matchers:
            self._matchers[sequence_id] = _TrackedSequence(matcher.clone())

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop the matchers of finished sequences.

        Args:
            is_unfinished: whether the sequence of an id still waits or runs.
        """
        for sequence_id in [each for each in self._matchers if not is_unfinished(each)]:
            del self._matchers[sequence_id]

    def follows(self, sequence_id: int) -> bool:
        """Whether this sequence has a grammar and has begun."""
        return sequence_id in self._matchers

    def forced(self, sequence_id: int, output: Sequence[int]) -> list[int]:
        """Return the tokens forced by a sequence's grammar (see `GrammarMatcher.forced`).

        Args:
            output: the sequence's generated tokens.
        """
        return self._at(sequence_id, output).forced()

    def num_allowed(self, sequence_id: int, output: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow a sequence's output."""
        return self._at(sequence_id, output).num_allowed(token_ids)

    def _at(self, sequence_id: int, output: Sequence[int]) -> GrammarMatcher:
        """Return a sequence's matcher, advanced to the end of its output."""
        if self._pending is not None:
            self._pending.result()  # masks of a discarded step
        return self._matchers[sequence_id].catch_up(output)

    def begin(self, plan: StepPlan, output_of: Callable[[int], Sequence[int]]) -> RowMasks | None:
        """Start computing the masks of a step's constrained sequences; return None if there are none.

        Args:
            output_of: returns the generated tokens of the sequence with this id.
        """
        if not self._matchers:
            return None
        if self._pending is not None:
            self._pending.result()  # masks of a discarded step
        rows, matchers, end = list[int](), list[GrammarMatcher](), 0
        self._sequence_ids = []
        for span in plan.spans:
            end += span.num_logit_rows
            followed = self._matchers.get(span.sequence_id)
            if followed is not None and span.num_logit_rows > len(span.scored_ids):
                states = _states(followed.catch_up(output_of(span.sequence_id)), span.draft_token_ids)
                first = end - 1 - span.num_draft_tokens
                rows += range(first, first + len(states))
                matchers += states
                self._sequence_ids += [span.sequence_id] * len(states)
        if not matchers:
            return None
        self._pending = self._worker.start(matchers)
        return RowMasks(rows, self._pending)

    def failure(self, sequence_id: int, num_tokens: int = 0) -> str | None:
        """Return why a sequence's mask in the latest step allows no token; None if its grammar did not fail.

        Args:
            num_tokens: its tokens from the step before the failure.
        """
        if self._pending is None or sequence_id not in self._sequence_ids:
            return None
        error = self._pending.result().errors.get(self._sequence_ids.index(sequence_id) + num_tokens)
        return None if error is None else str(error)

    @cached_property
    def _worker(self) -> MaskWorker:
        return MaskWorker(self._model_info.vocab_size, min(MAX_THREADS, os.cpu_count() or 1))


def _states(matcher: GrammarMatcher, draft_token_ids: Sequence[int]) -> list[GrammarMatcher]:
    """The matcher, and copies of it after each draft token, up to one that is not accepted (a mask may allow it where
    the grammar reaches its limits). Later rows do not count."""
    states = [matcher]
    for token_id in draft_token_ids:
        states.append(states[-1].clone())
        if not states[-1].accept(token_id):
            break
    return states
