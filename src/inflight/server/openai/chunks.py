"""The events of OpenAI's streams. What all chunks of an answer have in common is encoded once, so a token costs little.

Decides where the usage goes. Does not know what a choice looks like.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from inflight.contracts.outputs import RequestOutput, TextDelta
from inflight.server.openai.sampling_fields import StreamOptions
from inflight.server.openai.usage import usage, usage_of
from inflight.server.serving.event_stream import DONE
from inflight.server.wire.json_route import to_json


class ChunkWriter(ABC):
    """Writes the chunks of one answer; see `Events`.

    Args:
        head: the fields that all chunks begin with.
        num_prompt_tokens: prompt tokens, summed over all prompts.
        num_left_out: how many tokens of each sequence are not counted.
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

    def of(self, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events for these deltas, whose tokens count from now on."""
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
