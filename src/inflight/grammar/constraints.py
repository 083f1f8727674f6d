"""`Constraints`: the sequences of an engine whose tokens a grammar decides.

Decides when a sequence's matcher goes on: when its next step begins, by the tokens that it has by then, never by those
of a step that was given up. Masks are computed in the background, from the plan of a step until somebody asks for them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from inflight.contracts.errors import InvalidRequestError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.params import SamplingParams
from inflight.contracts.plan import StepPlan
from inflight.execution.sampling.token_mask import TokenMasks
from inflight.grammar.compiler import GrammarCompiler
from inflight.grammar.mask_worker import MaskHandle, MaskWorker
from inflight.grammar.matcher import GrammarMatcher
from inflight.text.tokenizer import Tokenizer

MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some `rows` of a step's logits, while they are being computed."""

    rows: list[int]
    handle: MaskHandle

    def result(self) -> TokenMasks:
        """Wait for them. A row for which something went wrong may choose nothing."""
        return TokenMasks(self.rows, self.handle.result().words)


@dataclass(slots=True)
class _Followed:
    """A sequence's matcher, and how many output tokens it has been told of."""

    matcher: GrammarMatcher
    num_tokens: int = 0

    def catch_up(self, output: Sequence[int]) -> None:
        for token_id in output[self.num_tokens :]:
            self.matcher.accept(token_id)
        self.num_tokens = len(output)


class Constraints:
    """Matchers, by sequence id.

    Args:
        tokenizer: None: nothing can be constrained.
        model_info: of the model whose logits are masked.
    """

    def __init__(self, tokenizer: Tokenizer | None, model_info: ModelInfo) -> None:
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            self._compiler = GrammarCompiler(tokenizer, model_info.vocab_size, model_info.eos_token_ids)
        self._model_info = model_info
        self._matchers: dict[int, _Followed] = {}
        self._pending: MaskHandle | None = None
        self._sequence_ids: list[int] = []  # of those masks

    def compile(self, params: SamplingParams) -> GrammarMatcher | None:
        """What a request's sequences are to follow; None if it asks for nothing. Other threads may call it, too.

        Raises `InvalidRequestError` if its output cannot be constrained as it asks."""
        asked = params.structured_output
        if asked is None:
            return None
        if self._compiler is None:
            raise InvalidRequestError("structured output needs a tokenizer, and this model has none")
        if not self._model_info.eos_token_ids:
            raise InvalidRequestError("structured output ends with an EOS token, and this model has none")
        for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids", "bad_words"):
            if getattr(params, name):
                raise InvalidRequestError(
                    f"{name} is {getattr(params, name)!r}, but structured output ends where its grammar does, and with "
                    "nothing else; it is not accepted with it"
                )
        try:
            return self._compiler.compile(asked)
        except (InvalidRequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no `Exception`
            raise InvalidRequestError(f"the structured output asked for cannot be compiled: {error!r}") from error

    def add(self, sequence_id: int, matcher: GrammarMatcher) -> None:
        """A sequence is constrained from its first token on; nothing happens if it is already."""
        if sequence_id not in self._matchers:
            self._matchers[sequence_id] = _Followed(matcher.clone())

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop the matchers of sequences that have ended.

        Args:
            is_unfinished: whether the sequence of an id still waits or runs.
        """
        for sequence_id in [each for each in self._matchers if not is_unfinished(each)]:
            del self._matchers[sequence_id]

    def begin(self, plan: StepPlan, output_of: Callable[[int], Sequence[int]]) -> RowMasks | None:
        """Begin to compute which tokens the constrained sequences of a step may choose from; None if it has none.

        Args:
            output_of: the tokens that a sequence of this id has generated.
        """
        if not self._matchers:
            return None
        if self._pending is not None:
            self._pending.result()  # of a step that was given up
        rows, matchers, end = [], [], 0
        self._sequence_ids = []
        for span in plan.spans:
            end += span.num_logit_rows
            followed = self._matchers.get(span.sequence_id)
            if followed is not None and span.num_logit_rows > len(span.scored_ids):
                followed.catch_up(output_of(span.sequence_id))
                rows.append(end - 1)
                matchers.append(followed.matcher)
                self._sequence_ids.append(span.sequence_id)
        if not matchers:
            return None
        self._pending = self._worker.start(matchers)
        return RowMasks(rows, self._pending)

    def failure(self, sequence_id: int) -> str | None:
        """Why a sequence of the last step that was begun was allowed nothing, if that was its grammar's fault."""
        if self._pending is None or sequence_id not in self._sequence_ids:
            return None
        error = self._pending.result().errors.get(self._sequence_ids.index(sequence_id))
        return None if error is None else str(error)

    @cached_property
    def _worker(self) -> MaskWorker:
        return MaskWorker(self._model_info.vocab_size, min(MAX_THREADS, os.cpu_count() or 1))
