"""Outputs for callers, under vLLM's names. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from inflight.contracts.api.pooling import Values

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """A request's times and counts. Times are seconds of `time.monotonic()`; None: not yet.

    Attributes:
        num_cached_tokens: prompt tokens of its first sequence found in the prefix cache. Tokens that the other `n - 1`
            sequences share with it are not counted.
        num_preemptions: how often one of its sequences was preempted.
        num_draft_tokens, num_accepted_tokens: draft tokens verified, and accepted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Logprob(NamedTuple):
    """The log-probability of one token at one position.

    A named tuple, which the garbage collector does not track: an answer may have a hundred thousand.

    Attributes:
        logprob: natural logarithm of its probability, as the model gave it (before temperature, penalties, filters).
        rank: rank among all tokens, from 1; equally likely tokens may share one.
        decoded_token: its text by itself; None when there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""The log-probabilities at one position, by token id: first the actual token, then the likeliest ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's `n` sequences.
        text: the decoded output, cut at a stop string; empty when there is no tokenizer.
        token_ids: the generated tokens, including a stop token.
        logprobs: one entry for each generated token, if the request asks for `logprobs`.
        cumulative_logprob: the sum of the generated tokens' own log-probabilities, in the same case.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "abort", "error"; None: still running.
        stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """All that a request has produced.

    Attributes:
        prompt: the prompt's text, if text was given.
        prompt_token_ids: the tokens that ran, after truncation.
        prompt_logprobs: one entry for each of them, if the request asks for `prompt_logprobs`; None for the first
            token, which no token comes before.
        error: what went wrong, if a sequence ended with "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector.

    Attributes:
        embedding: 32-bit floats, as an `array`; `numpy.asarray` takes it without a copy.
        num_prompt_tokens: tokens that ran.
    """

    embedding: Values
    num_prompt_tokens: int


@dataclass(slots=True)
class ClassificationOutput:
    """A classifier's result for a text.

    Attributes:
        probs: a number for each of the model's labels: probabilities, unless the checkpoint says otherwise.
        label: that of the greatest.
        num_prompt_tokens: tokens that ran.
    """

    probs: Values
    label: str
    num_prompt_tokens: int


@dataclass(slots=True)
class ScoreOutput:
    """The score of a pair of texts.

    Attributes:
        score: of a reranker or a cross encoder from 0 to 1, unless the checkpoint says otherwise; of embeddings their
            similarity.
        num_prompt_tokens: tokens that ran.
    """

    score: float
    num_prompt_tokens: int


class TokenScore(NamedTuple):
    """A token's log-probability, its rank, and the likeliest tokens at its position: `TokenLogprobs` inside the
    engine."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One sequence's output of one step: the engine's message to the fronts. Every sequence is reported until
    `finish_reason` is set, exactly once. `first_scheduled_time` and the fields `num_…` count for the sequence from its
    start; its request's metrics are computed from them.

    Attributes:
        scores: of the new tokens, if the request asks for `logprobs`.
        prompt_scores: of the prompt's tokens from the second on, if it asks for `prompt_logprobs`: once, with the first
            new tokens of sequence 0.
        values: of a text that is pooled, once it has run: its numbers, 32-bit floats in the machine's order.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None
    values: bytes | None = None


def merged(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """The outputs of several steps for one sequence, as if one step had given them."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        new_token_ids=list(chain.from_iterable(each.new_token_ids for each in outputs)),
        scores=_joined([each.scores for each in outputs]),
        prompt_scores=_joined([each.prompt_scores for each in outputs]),
    )


def _joined(scores: list[list[TokenScore] | None]) -> list[TokenScore] | None:
    given = [each for each in scores if each is not None]
    return list(chain.from_iterable(given)) if given else None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of a stream: the text that one step added to one sequence. `str(delta)` is its text.

    Attributes:
        prompt_index: which of the prompts given.
        index: which of its `n` sequences.
        text: final text: whole characters, and nothing that may still become part of a stop string.
        token_ids: the step's new tokens (their text may follow in a later delta).
        logprobs: of these tokens, if the request asks for them.
        prompt_logprobs: as in `RequestOutput`, once, on a first delta.
        finish_reason, stop_reason: set on the sequence's last delta, as in `CompletionOutput`.
        output: the whole request, on the delta that finishes its last sequence.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None

    def __str__(self) -> str:
        return self.text
