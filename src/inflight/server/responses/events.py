"""The events of a response's stream, in the order that OpenAI's clients expect. A token costs little to encode."""

from collections.abc import Callable, Sequence
from typing import Any

from inflight.contracts.outputs import RequestOutput, TextDelta
from inflight.server.chat_format.blocks import Block, CallBlock, Growth, TextBlock, ThoughtBlock
from inflight.server.responses.answer import (
    PreparedResponse,
    failed,
    item,
    item_id,
    new_logprobs,
    part,
    running,
    thought_part,
)
from inflight.server.responses.scored_blocks import ScoredBlocks
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import to_json


class ResponseEvents:
    """Writes the events of one response.

    Args:
        finish: makes the response object from what was generated.
    """

    def __init__(
        self, prepared: PreparedResponse, finish: Callable[[RequestOutput, ScoredBlocks], dict[str, Any]]
    ) -> None:
        self._prepared = prepared
        self._finish = finish
        self._blocks = prepared.blocks()
        self._number = 0
        self._has_logprobs = True  # whether the latest item may have some
        self._head = b""  # what each delta event of the latest item begins with

    def of(self, deltas: list[TextDelta]) -> bytes:
        events = b"" if self._number else self._created()
        for delta in deltas:
            self._blocks.see(new_logprobs(self._prepared, delta))
            grown = self._blocks.feed(delta.text, is_last=delta.finish_reason is not None)
            events += b"".join(map(self._grown, grown))
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events, which repeat as a whole what was sent in pieces."""
        rest = self._blocks.rest()
        events = self._added("", rest) if rest else b""
        response = self._finish(outputs[0], self._blocks)
        events += self._ended(response["output"][-1])
        return events + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a response that failed."""
        begin = b"" if self._number else self._created()
        return begin + self._event("response.failed", response=failed(self._prepared, error))

    def _created(self) -> bytes:
        response = running(self._prepared)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _grown(self, growth: Growth) -> bytes:
        """Return a growth's events: for a new item, the previous item's end and its own start; then the addition."""
        events, scores = b"", self._blocks.taken_by(growth)
        if growth.is_new:
            if before := growth.number:
                block, of_block = self._blocks.blocks[before - 1], self._blocks.scores.get(before - 1, ())
                events = self._ended(item(self._prepared, block, "completed", of_block))
            events += self._begun(growth.number, growth.block)
        return events + self._added(growth.added, scores) if growth.added else events

    def _begun(self, index: int, block: Block) -> bytes:
        self._has_logprobs = isinstance(block, TextBlock)
        place = {"item_id": item_id(block), "output_index": index}
        nothing: dict[str, Any] = {"arguments": ""} if isinstance(block, CallBlock) else {"content": []}
        begun = {**item(self._prepared, block, "in_progress"), **nothing}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        kind = "response.function_call_arguments.delta"
        if not isinstance(block, CallBlock):
            place["content_index"] = 0
            is_thought = isinstance(block, ThoughtBlock)
            begun_part = thought_part("") if is_thought else part("")
            events += self._event("response.content_part.added", **place, part=begun_part)
            kind = f"response.{'reasoning' if is_thought else 'output'}_text.delta"
        self._head = b"event: %b\ndata: %b," % (kind.encode(), to_json({"type": kind, **place})[:-1])
        return events

    def _added(self, text: str, token_logprobs: list[dict[str, Any]]) -> bytes:
        """Return the event that adds `text` to the latest item."""
        logprobs = b',"logprobs":%b' % to_json(token_logprobs) if self._has_logprobs else b""
        event = self._head + b'"sequence_number":%d,"delta":%b%b}\n\n' % (self._number, to_json(text), logprobs)
        self._number += 1
        return event

    def _ended(self, ended: dict[str, Any]) -> bytes:
        """Return the events that end an item."""
        index = next(i for i, block in enumerate(self._blocks.blocks) if item_id(block) == ended["id"])
        place = {"item_id": ended["id"], "output_index": index}
        if ended["type"] == "function_call":
            what = {"name": ended["name"], "arguments": ended["arguments"]}
            events = self._event("response.function_call_arguments.done", **place, **what)
        else:
            (text,) = ended["content"]
            place["content_index"] = 0
            if ended["type"] == "reasoning":
                events = self._event("response.reasoning_text.done", **place, text=text["text"])
            else:
                events = self._event("response.output_text.done", **place, text=text["text"], logprobs=text["logprobs"])
            events += self._event("response.content_part.done", **place, part=text)
        return events + self._event("response.output_item.done", output_index=index, item=ended)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
