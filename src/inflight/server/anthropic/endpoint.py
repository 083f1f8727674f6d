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
from inflight.server.chat_format.answer_form import AnswerForm
from inflight.server.chat_format.blocks import Block, Blocks, CallBlock, Growth, TextBlock, ThoughtBlock
from inflight.server.openai.usage import size_of_answer
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json
from inflight.server.wire.off_loop import off_loop
from inflight.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)

SIGNATURE = "unsigned"
"""Of thoughts. Anthropic's servers sign theirs; clients send a signature back as it is."""


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, as Anthropic's API does."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        service.adapter_of(body.model)
        info = await service.generating_info()
        prepared = await off_loop(len(await request.body()), lambda: _prepare(body, service, info))
        if not body.stream:
            (output,) = await generate(service, prepared.generation, client)
            return await off_loop(size_of_answer([output]), lambda: _answer(prepared, output))
    return stream(service, prepared.generation, _Events(prepared), partial(anthropic_errors.event, request=request))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a chat."""
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.generating_info()
    size = len(await request.body())
    chat, thinking = body.for_template(), body.wanted_thinking
    written = await off_loop(size, lambda: service.written(chat, info, "messages", thinking))
    return Response(to_json({"input_tokens": len(written.token_ids)}), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _PreparedMessage:
    """A messages request that is ready to run.

    Attributes:
        form: how thoughts and tool calls are read, if there may be any.
        shows_thoughts: whether the client wants to see thoughts.
        head: the fields that the answer begins with.
    """

    generation: Generation
    max_tokens: int
    form: AnswerForm | None
    shows_thoughts: bool
    tokenizer: Tokenizer | None
    head: dict[str, Any]

    def blocks(self) -> Blocks:
        """What an answer that begins is divided into."""
        return Blocks(None if self.form is None else self.form.make_reader())


def _prepare(body: MessagesRequest, service: Service, info: ModelInfo) -> _PreparedMessage:
    text, token_ids = service.written(body.for_template(), info, "messages", body.wanted_thinking)
    form = service.answer_form(body.tool_fields, body.structured_output, text, body.wanted_thinking)
    options = {} if form is None else form.sampling_options
    params = body.sampling_params(service.llm.get_default_sampling_params(), info.vocab_size, **options)
    prompt = service.fitted(token_ids, info, "messages")
    message_id = f"msg_{uuid.uuid4().hex}"
    head = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": service.name_of(service.adapter_of(body.model)),
    }
    return _PreparedMessage(
        Generation(message_id, [prompt], params, body.priority or 0, body.cache_salt, service.adapter_of(body.model)),
        body.max_tokens,
        form,
        body.thinking is None or body.thinking.display != "omitted",
        service.llm.tokenizer,
        head,
    )


def _answer(prepared: _PreparedMessage, output: RequestOutput) -> Response:
    blocks = prepared.blocks()
    blocks.feed(output.outputs[0].text, is_last=True)
    content = [_content(block, prepared.shows_thoughts) for block in blocks.blocks]
    usage = _usage_of(prepared, output, blocks)
    answer = {**prepared.head, "content": content, **_ending(prepared, output, blocks), "usage": usage}
    return Response(to_json(answer), media_type="application/json")


def _content(block: Block, shows_thoughts: bool) -> dict[str, Any]:
    """Return a whole block. The arguments of a tool call that was cut off are left out: they are not valid JSON."""
    if isinstance(block, ThoughtBlock):
        return {"type": "thinking", "thinking": block.text if shows_thoughts else "", "signature": SIGNATURE}
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


def _usage_of(prepared: _PreparedMessage, output: RequestOutput, blocks: Blocks) -> dict[str, Any]:
    num_cached = output.metrics.num_cached_tokens
    usage = _usage(len(output.prompt_token_ids), len(output.outputs[0].token_ids), num_cached)
    if prepared.form is None or prepared.tokenizer is None:
        return usage
    return {**usage, "output_tokens_details": {"thinking_tokens": blocks.num_thought_tokens(prepared.tokenizer)}}


def _usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
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
        self._blocks = prepared.blocks()
        self._has_begun = False

    def of(self, deltas: list[TextDelta]) -> bytes:
        events = b"" if self._has_begun else self._begin(len(deltas[0].token_ids))
        self._has_begun = True
        for delta in deltas:
            grown = self._blocks.feed(delta.text, is_last=delta.finish_reason is not None)
            events += b"".join(map(self._grown, grown))
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        usage = _usage_of(self._prepared, output, self._blocks)
        return (
            self._ended(len(self._blocks.blocks) - 1)
            + _event("message_delta", delta=_ending(self._prepared, output, self._blocks), usage=usage)
            + _event("message_stop")
        )

    def _begin(self, num_tokens: int) -> bytes:
        num_prompt = len(self._prepared.generation.prompts[0])
        nothing_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._prepared.head, **nothing_yet, "usage": _usage(num_prompt, num_tokens)}
        return _event("message_start", message=message) + _event("ping")

    def _grown(self, growth: Growth) -> bytes:
        """Return a growth's events: for a new block, the previous block's end and its own start; then the addition."""
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
            case ThoughtBlock():
                shown = added if self._prepared.shows_thoughts else ""
                return events + _delta(number, "thinking_delta", thinking=shown) if shown else events
            case CallBlock():
                return events + _delta(number, "input_json_delta", partial_json=added)

    def _ended(self, number: int) -> bytes:
        """Return the events that end a block."""
        is_thought = isinstance(self._blocks.blocks[number], ThoughtBlock)
        signed = _delta(number, "signature_delta", signature=SIGNATURE) if is_thought else b""
        return signed + _event("content_block_stop", index=number)


def _begun(block: Block) -> dict[str, Any]:
    match block:
        case TextBlock():
            return {"type": "text", "text": ""}
        case ThoughtBlock():
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
