"""The events of OpenAI's streams, and `usage`. The common part of an answer's chunks is encoded once.

Places the usage; independent of a choice's format.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.server.openai.sampling_fields import StreamOptions
from inflight.server.serving.chat import Events
from inflight.server.wire.json_route import to_json

DONE = b"data: [DONE]\n\n"


class ChunkWriter(Events):
    """Writes the chunks of one answer; see `Events`.

    Args:
        head: the leading fields of all chunks.
        num_prompt_tokens: prompt tokens, summed over all prompts.
        num_left_out: tokens of each sequence to leave out of the count.
    """

    def __init__(
        self,
        head: dict[str, Any],
        options: StreamOptions | None,
        num_prompt_tokens: int,
        num_left_out: int = 0,
    ) -> None:
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        options = options or StreamOptions()
        self._is_usage_wanted = bool(options.include_usage)
        self._is_usage_continuous = self._is_usage_wanted and bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._is_usage_wanted else b"]}\n\n"
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._num_left_out = num_left_out

    def write(self, deltas: list[TextDelta]) -> bytes:
        """Return the events for these deltas, and count their tokens."""
        if self._is_usage_continuous:
            self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
            so_far = usage(self._num_prompt_tokens, 0 if self._num_left_out else self._num_tokens)
            self._tail = b'],"usage":' + to_json(so_far) + b"}\n\n"
        return b"".join(map(self.events_of, deltas))

    @abstractmethod
    def events_of(self, delta: TextDelta) -> bytes:
        """Return the events for one delta; each endpoint has its own."""

    def usage_of(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the usage at the end."""
        return usage_of(outputs, self._num_left_out)

    def chunk(self, choice: bytes, **fields: Any) -> bytes:
        """Return an event with one choice, which is an encoded JSON object (b"": with none), and with these fields."""
        more = b"]," + to_json(fields)[1:-1] + self._tail[1:] if fields else self._tail
        return self._head + choice + more

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the events after the last choice."""
        if not self._is_usage_wanted:
            return DONE
        whole = to_json(self.usage_of(outputs))
        return self._head + b'],"usage":' + whole + b"}\n\n" + DONE


def usage_of(
    outputs: Sequence[RequestOutput],
    num_left_out: int = 0,
    *,
    is_predicted: bool = False,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return `usage` of finished outputs, not counting `num_left_out` tokens of each sequence (not requested).

    Args:
        is_predicted: whether usage counts accepted and rejected draft tokens, from a prediction or otherwise.
        num_reasoning_tokens: reasoning tokens, if the model may reason.
    """
    num_completion = sum(len(each.token_ids) - num_left_out for output in outputs for each in output.outputs)
    counts = usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        num_completion,
        sum(output.metrics.num_cached_tokens for output in outputs),
    )
    details = {}
    if num_reasoning_tokens is not None:
        details["reasoning_tokens"] = num_reasoning_tokens
    if is_predicted:
        num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        num_rejected = sum(output.metrics.num_draft_tokens for output in outputs) - num_accepted
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_rejected
    return counts | ({"completion_tokens_details": details} if details else {})


def usage(num_prompt: int, num_completion: int, num_cached: int | None = None) -> dict[str, Any]:
    """Return `usage` of the given counts; `num_cached`, tokens found in the prefix cache, is known only at the end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": None if num_cached is None else {"cached_tokens": num_cached},
    }
