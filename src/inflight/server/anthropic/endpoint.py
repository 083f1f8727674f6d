"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`: decides how they are answered, also as a stream."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import RequestOutput, TextDelta
from inflight.server.anthropic import errors as anthropic_errors
from inflight.server.anthropic.request import CountRequest, MessagesRequest
from inflight.server.openai.usage import size_of_answer
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
from inflight.server.tools.blocks import Block, Blocks, Growth, TextBlock
from inflight.server.tools.tool_use import ToolUse
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json
from inflight.server.wire.off_loop import off_loop

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, as Anthropic's API does."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        service.check_model(body.model)
        info = await service.model_info()
        prepared = await off_loop(len(await request.body()), lambda: _prepare(body, service, info))
        if not body.stream:
            (output,) = await generate(service, prepared.generation, client)
            return await off_loop(size_of_answer([output]), lambda: _answer(prepared, output))
    return stream(service, prepared.generation, _Events(prepared), partial(anthropic_errors.event, request=request))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a chat."""
    service = service_of(request)
    service.check_model(body.model)
    info = await service.model_info()
    size = len(await request.body())
    token_ids = await off_loop(size, lambda: service.token_ids(body.for_template(), info, "messages"))
    return Response(to_json({"input_tokens": len(token_ids)}), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _PreparedMessage:
    """A messages request that is ready to run.

    Attributes:
        tools: how tool calls are read, if tools may be called.
        head: the fields that the answer begins with.
    """

    generation: Generation
    max_tokens: int
    tools: ToolUse | None
    head: dict[str, Any]


def _prepare(body: MessagesRequest, service: Service, info: ModelInfo) -> _PreparedMessage:
    tools = service.tool_use(body.tool_fields, body.structured_output)
    options = {} if tools is None else tools.sampling_options
    params = body.sampling_params(service.llm.get_default_sampling_params(), **options)
    token_ids = service.token_ids(body.for_template(), info, "messages")
    prompt = service.fitted(token_ids, info, "messages")
    message_id = f"msg_{uuid.uuid4().hex}"
    head = {"id": message_id, "type": "message", "role": "assistant", "model": service.settings.model_name}
    return _PreparedMessage(Generation(message_id, [prompt], params), body.max_tokens, tools, head)


def _answer(prepared: _PreparedMessage, output: RequestOutput) -> Response:
    blocks = Blocks(prepared.tools)
    blocks.feed(output.outputs[0].text, is_last=True)
    content = list(map(_content, blocks.blocks))
    answer = {**prepared.head, "content": content, **_ending(prepared, output, blocks), "usage": _usage_of(output)}
    return Response(to_json(answer), media_type="application/json")


def _content(block: Block) -> dict[str, Any]:
    """Return a whole block. The arguments of a tool call that was cut off are left out: they are not valid JSON."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _ending(prepared: _PreparedMessage, output: RequestOutput, blocks: Blocks) -> dict[str, str | None]:
    """Return why the answer ended. Anthropic's API has no name for stop tokens, so those count as "end_turn"."""
    (completion,) = output.outputs
    if completion.finish_reason == "length":
        is_full = len(completion.token_ids) < prepared.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if blocks.has_calls else "end_turn", "stop_sequence": None}


def _usage_of(output: RequestOutput) -> dict[str, int]:
    num_cached = output.metrics.num_cached_tokens
    return _usage(len(output.prompt_token_ids), len(output.outputs[0].token_ids), num_cached)


def _usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, int]:
    """Return `usage`; prompt tokens found in the prefix cache are counted apart from the prompt's other tokens."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


class _Events:
    """Writes the events of one answer. (Only the usage at the end is exact: cached tokens are not known before.)"""

    def __init__(self, prepared: _PreparedMessage) -> None:
        self._prepared = prepared
        self._blocks = Blocks(prepared.tools)
        self._has_begun = False

    def of(self, deltas: list[TextDelta]) -> bytes:
        events = b"" if self._has_begun else self._begin(len(deltas[0].token_ids))
        self._has_begun = True
        for delta in deltas:
            grown = self._blocks.feed(delta.text, is_last=delta.finish_reason is not None)
            events += b"".join(map(_grown, grown))
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        return (
            _event("content_block_stop", index=len(self._blocks.blocks) - 1)
            + _event("message_delta", delta=_ending(self._prepared, output, self._blocks), usage=_usage_of(output))
            + _event("message_stop")
        )

    def _begin(self, num_tokens: int) -> bytes:
        num_prompt = len(self._prepared.generation.prompts[0])
        nothing_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._prepared.head, **nothing_yet, "usage": _usage(num_prompt, num_tokens)}
        return _event("message_start", message=message) + _event("ping")


def _grown(growth: Growth) -> bytes:
    """Return a growth's events: for a new block, the previous block's end and its own start; then the addition."""
    number, block, added, is_new = growth
    if not added and not is_new:
        return b""
    events = b""
    if is_new and number:
        events += _event("content_block_stop", index=number - 1)
    if isinstance(block, TextBlock):
        if is_new:
            events += _event("content_block_start", index=number, content_block={"type": "text", "text": ""})
        return events + _TEXT % (number, to_json(added)) if added else events
    if is_new:
        begun = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        events += _event("content_block_start", index=number, content_block=begun)
    delta = {"type": "input_json_delta", "partial_json": added}
    return events + _event("content_block_delta", index=number, delta=delta)


_TEXT = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))
