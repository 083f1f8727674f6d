"""`POST /v1/chat/completions`: decides how chats are answered, whole and as a stream."""

import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from msgspec import Raw
from starlette.responses import Response

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.openai import logprobs
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.openai.chunks import ChunkWriter
from inflight.server.openai.usage import size_of_answer, usage_of
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
from inflight.server.tools.answer import delta_of, finish_reason_of, message_of
from inflight.server.tools.tool_use import ToolUse
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json
from inflight.server.wire.off_loop import off_loop
from inflight.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        service.check_model(body.model)
        info = await service.model_info()
        size = len(await request.body())
        prepared = await off_loop(size, lambda: _prepare(body, service, info))
        if not body.stream:
            (output,) = await generate(service, prepared.generation, client)
            return await off_loop(size_of_answer([output]), lambda: _answer(prepared, output))
    return stream(service, prepared.generation, _Chunks(prepared))


@dataclass(frozen=True, slots=True)
class _PreparedChat:
    """A chat request that is ready to run.

    Attributes:
        tools: how tool calls are read, if tools may be called.
        head: the fields that the answer and each of its chunks begin with, except `object`.
    """

    body: ChatRequest
    generation: Generation
    tokenizer: Tokenizer | None
    tools: ToolUse | None
    head: dict[str, Any]


def _prepare(body: ChatRequest, service: Service, info: ModelInfo) -> _PreparedChat:
    body.check(service.settings)
    chat = body.for_template(service.settings)
    tools = service.tool_use(body, body.structured_output, body.chat_template)
    params = body.sampling_params(
        service.llm.get_default_sampling_params(),
        service.settings,
        info.vocab_size,
        max_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        prediction=body.predicted_text,
        **({} if tools is None else tools.sampling_options),
    )
    service.check_num_sequences(1, params.n, "n")
    token_ids = service.token_ids(chat, info, "messages")
    prompt = service.fitted(token_ids, info, "messages", body.truncate_prompt_tokens)
    service.check_num_scores([prompt], params)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    return _PreparedChat(
        body,
        Generation(request_id, [prompt], params, body.priority or 0, body.cache_salt),
        service.llm.tokenizer,
        tools,
        {"id": request_id, "created": int(time.time()), "model": service.settings.model_name},
    )


# ------------------------------------------------------------------------------------- whole answers


def _answer(prepared: _PreparedChat, output: RequestOutput) -> Response:
    answer = {
        **prepared.head,
        "object": "chat.completion",
        "choices": [Raw(to_json(_choice(prepared, completion))) for completion in output.outputs],  # one at a time
        "usage": usage_of([output], is_predicted=prepared.body.prediction is not None),
        "system_fingerprint": None,
    }
    if prepared.body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs or [])
    if prepared.body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return Response(to_json(answer), media_type="application/json")


def _choice(prepared: _PreparedChat, completion: CompletionOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"content": completion.text}
    finish_reason: str | None = completion.finish_reason
    if prepared.tools is not None:
        parser = prepared.tools.parser()
        message = message_of([*parser.feed(completion.text), *parser.finish()])
        finish_reason = finish_reason_of(parser, completion.finish_reason)
    choice: dict[str, Any] = {
        "index": completion.index,
        "message": {"role": "assistant", "refusal": None, **message},
        "logprobs": _logprobs(prepared, completion),
        "finish_reason": finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if prepared.body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _logprobs(prepared: _PreparedChat, news: CompletionOutput | TextDelta) -> dict[str, Any] | None:
    """Return `logprobs`, if requested."""
    num_top = prepared.body.num_logprobs
    if num_top is None:
        return None
    content = logprobs.of_chat(news.token_ids, news.logprobs or [], num_top, prepared.tokenizer)
    return {"content": content, "refusal": None}


# ------------------------------------------------------------------------------------- streams


class _Chunks(ChunkWriter):
    """Writes the chunks of one answer."""

    def __init__(self, prepared: _PreparedChat) -> None:
        body, prompt = prepared.body, prepared.generation.prompts[0]
        head = {**prepared.head, "object": "chat.completion.chunk"}
        if body.return_token_ids:
            head["prompt_token_ids"] = prompt
        self._prepared = prepared
        super().__init__(head, body.stream_options, len(prompt), is_predicted=body.prediction is not None)
        self._is_plain = body.num_logprobs is None and not body.return_token_ids
        self._has_begun = [False] * prepared.generation.params.n
        self._parsers = [] if prepared.tools is None else [prepared.tools.parser() for _ in self._has_begun]

    def events_of(self, delta: TextDelta) -> bytes:
        """Return a choice's events: the role first, then what is new, then the finish reason once it has ended."""
        events = b""
        if not self._has_begun[delta.index]:
            self._has_begun[delta.index] = True
            events = self._event(delta.index, {"role": "assistant", "content": None if self._parsers else ""})
        if self._parsers:
            events += self._events_of_pieces(delta)
        elif not self._is_plain:
            events += self._event(delta.index, {"content": delta.text}, **self._extras(delta))
        elif delta.text:
            text = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
            events += self.chunk(text % (delta.index, to_json(delta.text)))
        if delta.finish_reason is not None:
            stop_reason = delta.stop_reason
            events += self._event(delta.index, {}, finish_reason=self._reason(delta), stop_reason=stop_reason)
        return events

    def _events_of_pieces(self, delta: TextDelta) -> bytes:
        """Return the new content and tool calls. What belongs to tokens, not to text, goes with the first event."""
        parser = self._parsers[delta.index]
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        deltas = list(map(delta_of, pieces))
        if self._is_plain:
            return b"".join(self._event(delta.index, each) for each in deltas)
        first, *others = deltas or [{}]
        events = self._event(delta.index, first, **self._extras(delta))
        return events + b"".join(self._event(delta.index, each) for each in others)

    def _reason(self, delta: TextDelta) -> str | None:
        if not self._parsers:
            return delta.finish_reason
        return finish_reason_of(self._parsers[delta.index], delta.finish_reason)

    def _extras(self, delta: TextDelta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": _logprobs(self._prepared, delta)}
        if self._prepared.body.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _event(self, index: int, delta: dict[str, Any], **others: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **others}
        return self.chunk(to_json(choice))
