"""The events of a response's stream, in the order that OpenAI's clients put together. A token adds little to write."""

from typing import Any

from inflight.outputs import TextDelta
from inflight.server.api_errors import ApiError
from inflight.server.chunks import to_json
from inflight.server.responses_answer import Asked, failed, item, part, running, told_logprobs

_PLACE = {"output_index": 0, "content_index": 0}


class ResponseEvents:
    """Of one response."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._number = 0
        self._delta = (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            b'"item_id":"%b","output_index":0,"content_index":0,' % asked.item_id.encode()
        )

    def of(self, deltas: list[TextDelta]) -> bytes:
        """The events for these; none, if they add nothing that can be shown yet."""
        return (b"" if self._number else self._begin()) + b"".join(map(self._text, deltas))

    def end(self, response: dict[str, Any]) -> bytes:
        """The last events: what has been told comes again, as a whole."""
        (message,) = response["output"]
        (text,) = message["content"]
        place = {"item_id": self._asked.item_id, **_PLACE}
        return (
            self._event("response.output_text.done", **place, text=text["text"], logprobs=text["logprobs"])
            + self._event("response.content_part.done", **place, part=text)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event(f"response.{response['status']}", response=response)
        )

    def failed(self, error: ApiError) -> bytes:
        """The last event, if something went wrong."""
        begin = b"" if self._number else self._created()
        return begin + self._event("response.failed", response=failed(self._asked, error))

    def _created(self) -> bytes:
        response = running(self._asked)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _begin(self) -> bytes:
        return (
            self._created()
            + self._event("response.output_item.added", output_index=0, item=item(self._asked, "in_progress"))
            + self._event("response.content_part.added", item_id=self._asked.item_id, **_PLACE, part=part(self._asked))
        )

    def _text(self, delta: TextDelta) -> bytes:
        told = told_logprobs(self._asked, delta)
        if not delta.text and not told:
            return b""
        rest = b'"sequence_number":%d,"delta":%b,"logprobs":%b}\n\n'
        event = self._delta + rest % (self._number, to_json(delta.text), to_json(told))
        self._number += 1
        return event

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
