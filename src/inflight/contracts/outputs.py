"""What callers get back. Names are vLLM's, which this field's users know. Plain data."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """When what happened to a request. Times are seconds of `time.monotonic()`; None: not yet.

    `num_cached_tokens` counts prompt tokens of its first sequence that were found in the prefix cache instead of being
    computed (what the other `n - 1` share with that one is not counted);
    `num_preemptions` how often one of its sequences had to give its blocks back and start over.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token, at one position.

    Attributes:
        logprob: natural logarithm of its probability, as the model gave it (before temperature, penalties, filters).
        rank: its place among all tokens, from 1; tokens that are equally likely may share it.
        decoded_token: its text by itself; None when there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""Of one position, by token id: the token that is there first, then the likeliest."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's `n` sequences.
        text: the decoded output, cut at a stop string; empty when there is no tokenizer.
        token_ids: the generated tokens, a stop token included.
        logprobs: of each generated token, if `logprobs` was asked for.
        cumulative_logprob: the sum of the generated tokens' own, then.
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
        prompt_logprobs: of each of them, if `prompt_logprobs` was asked for; nothing comes before the first: None.
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


class TokenScore(NamedTuple):
    """A token's log-probability, its rank, and the likeliest tokens at its place: the engine's word for `Logprob`s."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step gave one sequence: the engine's message to the fronts.

    Every sequence is heard of until, exactly once, `finish_reason` is set. `first_scheduled_time`, `num_preemptions`
    and `num_cached_tokens` are the sequence's own (metrics of its request are made from them).

    Attributes:
        scores: of the new tokens, if the request wants `logprobs`.
        prompt_scores: of the prompt's tokens from the second on, if it wants `prompt_logprobs`: once, with the first
            new tokens of sequence 0.
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
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of a stream: the text that one step added to one sequence. `str(delta)` is its text.

    Attributes:
        prompt_index: which of the prompts given.
        index: which of its `n` sequences.
        text: certain text: whole characters, nothing that may yet turn out to be a stop string.
        token_ids: the step's new tokens (their text may follow in a later delta).
        logprobs: of these tokens, if `logprobs` was asked for.
        prompt_logprobs: of the prompt, as in `RequestOutput`: once, on a first delta.
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
