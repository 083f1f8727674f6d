"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: formats answers, streams and errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.server.anthropic.request import CountRequest, MessagesRequest
from inflight.server.chat_format.blocks import Block, BlockDelta, Blocks, CallBlock, ReasoningBlock, TextBlock
from inflight.server.serving.chat import ChatAnswer, Events, answer_chat
from inflight.server.serving.service import service_of
from inflight.server.wire.api_errors import ApiError, ErrorEnvelope
from inflight.server.wire.json_route import json_response, to_json
from inflight.server.wire.off_loop import off_loop

SIGNATURE = "unsigned"
"""The signature of reasoning. Anthropic's servers sign theirs; clients send it back unchanged."""


async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, as Anthropic's API does."""
    return await answer_chat(body, request, _Answer)


async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a chat."""
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.generating_info()
    size = len(await request.body()) + await service.fetch_items(info)
    chat, options = body.for_template(service.settings), body.reasoning_options
    written = await off_loop(size, lambda: service.written(chat, info, "messages", options))
    return json_response({"input_tokens": len(written.token_ids)})


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_TOO_LONG = "prompt is too long"
"""Anthropic's envelope has no code for it: clients match these words in the message (Claude Code does, to compact its
chat)."""


class AnthropicErrors(ErrorEnvelope):
    """Anthropic's envelope. Decides which error type each status gets; `api_errors` decides the message."""

    def body(self, error: ApiError, scope: Scope) -> bytes:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = f"{_TOO_LONG}: {error}" if error.code == "context_length_exceeded" else str(error)
        request_id = scope.get("state", {}).get("request_id")
        fields = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        return json.dumps(fields).encode()

    def event(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"


class _Answer(ChatAnswer[MessagesRequest]):
    """A message."""

    ID = "msg_"

    @property
    def head(self) -> dict[str, Any]:
        """The fields that the answer begins with."""
        return {"id": self.generation.request_id, "type": "message", "role": "assistant", "model": self.model_name}

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer includes reasoning."""
        return self.body.thinking is None or self.body.thinking.display != "omitted"

    def whole(self, output: RequestOutput) -> bytes:
        blocks = self.new_blocks()
        blocks.feed(output.outputs[0].text, is_last=True)
        content = [_content(block, self.shows_reasoning) for block in blocks.blocks]
        usage = self.usage(output, blocks)
        return to_json({**self.head, "content": content, **self.ending(output, blocks), "usage": usage})

    def events(self) -> "_Events":
        return _Events(self)

    def ending(self, output: RequestOutput, blocks: Blocks) -> dict[str, str | None]:
        """Return the stop reason. Anthropic's API has none for stop tokens, so these count as "end_turn"."""
        (completion,) = output.outputs
        if completion.finish_reason == "length":
            is_full = len(completion.token_ids) < self.body.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        return {"stop_reason": "tool_use" if blocks.num_calls else "end_turn", "stop_sequence": None}

    def usage(self, output: RequestOutput, blocks: Blocks) -> dict[str, Any]:
        """Return `usage` of the whole answer."""
        num_cached = output.metrics.num_cached_tokens
        usage = _usage(len(output.prompt_token_ids), len(output.outputs[0].token_ids), num_cached)
        num_reasoning_tokens = self.num_reasoning_tokens(blocks)
        if num_reasoning_tokens is None:
            return usage
        return {**usage, "output_tokens_details": {"thinking_tokens": num_reasoning_tokens}}


def _content(block: Block, shows_reasoning: bool) -> dict[str, Any]:
    """Return a whole block. Truncated arguments of a tool call are left out: they are not valid JSON."""
    if isinstance(block, ReasoningBlock):
        return {"type": "thinking", "thinking": block.text if shows_reasoning else "", "signature": SIGNATURE}
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    """Return `usage`, with cached prompt tokens counted separately."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


class _Events(Events):
    """Writes the events of one answer. (Only the usage at the end is exact: cached tokens are not known before.)"""

    def __init__(self, answer: _Answer) -> None:
        self._answer, self._blocks = answer, answer.new_blocks()
        self._has_begun = False

    def write(self, deltas: list[TextDelta]) -> bytes:
        events = b"" if self._has_begun else self._begin(len(deltas[0].token_ids))
        self._has_begun = True
        for delta in deltas:
            grown = self._blocks.feed(delta.text, is_last=delta.finish_reason is not None)
            events += b"".join(map(self._grown, grown))
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        ending, usage = self._answer.ending(output, self._blocks), self._answer.usage(output, self._blocks)
        return (
            self._ended(len(self._blocks.blocks) - 1)
            + _event("message_delta", delta=ending, usage=usage)
            + _event("message_stop")
        )

    def _begin(self, num_tokens: int) -> bytes:
        num_prompt = len(self._answer.generation.prompts[0])
        nothing_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._answer.head, **nothing_yet, "usage": _usage(num_prompt, num_tokens)}
        return _event("message_start", message=message) + _event("ping")

    def _grown(self, growth: BlockDelta) -> bytes:
        """Return a delta's events: for a new block, the previous block's end and its own start; then the addition."""
        number, block, added, is_new = growth
        if not added and not is_new:
            return b""
        events = b""
        if is_new:
            events = self._ended(number - 1) if number else b""
            events += _event("content_block_start", index=number, content_block=_begun(block))
        match block:
            case TextBlock():
                return events + _TEXT % (number, to_json(added)) if added else events
            case ReasoningBlock():
                shown = added if self._answer.shows_reasoning else ""
                return events + _delta(number, "thinking_delta", thinking=shown) if shown else events
            case CallBlock():
                return events + _delta(number, "input_json_delta", partial_json=added)

    def _ended(self, number: int) -> bytes:
        """Return the events that end a block."""
        is_reasoning = isinstance(self._blocks.blocks[number], ReasoningBlock)
        signed = _delta(number, "signature_delta", signature=SIGNATURE) if is_reasoning else b""
        return signed + _event("content_block_stop", index=number)


def _begun(block: Block) -> dict[str, Any]:
    match block:
        case TextBlock():
            return {"type": "text", "text": ""}
        case ReasoningBlock():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBlock():
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


_TEXT = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


def _delta(number: int, kind: str, **added: str) -> bytes:
    return _event("content_block_delta", index=number, delta={"type": kind, **added})
