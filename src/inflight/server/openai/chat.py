"""`POST /v1/chat/completions`: decides how chats are answered, whole and as a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from msgspec import Raw
from starlette.responses import Response

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.chat_format.answer_form import AnswerForm
from inflight.server.chat_format.message import delta_of, finish_reason_of, message_of
from inflight.server.chat_format.template_reader import Piece, Thought
from inflight.server.openai import logprobs
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.openai.chunks import ChunkWriter
from inflight.server.openai.usage import size_of_answer, usage_of
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
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
        service.adapter_of(body.model)
        info = await service.generating_info()
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
        form: how thoughts and tool calls are read, if there may be any.
        head: the fields that the answer and each of its chunks begin with, except `object`.
    """

    body: ChatRequest
    generation: Generation
    tokenizer: Tokenizer | None
    form: AnswerForm | None
    head: dict[str, Any]

    def shown(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that the client wants to see."""
        if self.body.include_reasoning is not False:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Thought)]

    def usage_of(self, output: RequestOutput, thoughts: list[str]) -> dict[str, Any]:
        """Return `usage`. Tokens of thoughts are counted by encoding their text once more."""
        num_thought_tokens = None
        if self.form is not None and self.tokenizer is not None:
            encode = self.tokenizer.encode
            num_thought_tokens = sum(len(encode(text, add_special_tokens=False)) for text in thoughts if text)
        is_predicted = self.body.prediction is not None
        return usage_of([output], is_predicted=is_predicted, num_thought_tokens=num_thought_tokens)


def _prepare(body: ChatRequest, service: Service, info: ModelInfo) -> _PreparedChat:
    body.check(service.settings)
    text, token_ids = service.written(body.for_template(service.settings), info, "messages", body.thinking)
    form = service.answer_form(body, body.structured_output, text, body.thinking, body.chat_template)
    params = body.sampling_params(
        service.llm.get_default_sampling_params(),
        service.settings,
        info.vocab_size,
        max_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        prediction=body.predicted_text,
        **({} if form is None else form.sampling_options),
    )
    service.check_num_sequences(1, params.n, "n")
    prompt = service.fitted(token_ids, info, "messages", body.truncate_prompt_tokens)
    service.check_num_scores([prompt], params)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    return _PreparedChat(
        body,
        Generation(request_id, [prompt], params, body.priority or 0, body.cache_salt, service.adapter_of(body.model)),
        service.llm.tokenizer,
        form,
        {"id": request_id, "created": int(time.time()), "model": service.name_of(service.adapter_of(body.model))},
    )


# ------------------------------------------------------------------------------------- whole answers


def _answer(prepared: _PreparedChat, output: RequestOutput) -> Response:
    choices, thoughts = list[Raw](), list[str]()
    for completion in output.outputs:
        pieces, finish_reason = _read(prepared, completion)
        choice = _choice(prepared, completion, message_of(prepared.shown(pieces)), finish_reason)
        choices.append(Raw(to_json(choice)))  # encoded one at a time
        thoughts.append("".join(piece.text for piece in pieces if isinstance(piece, Thought)))
    answer = {
        **prepared.head,
        "object": "chat.completion",
        "choices": choices,
        "usage": prepared.usage_of(output, thoughts),
        "system_fingerprint": None,
    }
    if prepared.body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs or [])
    if prepared.body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return Response(to_json(answer), media_type="application/json")


def _read(prepared: _PreparedChat, completion: CompletionOutput) -> tuple[list[Piece], str | None]:
    """Return what a text consists of, and the finish reason to report."""
    if prepared.form is None:
        return [completion.text], completion.finish_reason
    reader = prepared.form.make_reader()
    pieces = [*reader.feed(completion.text), *reader.finish()]
    return pieces, finish_reason_of(reader, completion.finish_reason)


def _choice(
    prepared: _PreparedChat, completion: CompletionOutput, message: dict[str, Any], finish_reason: str | None
) -> dict[str, Any]:
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
        super().__init__(head, body.stream_options, len(prompt))
        self._is_plain = body.num_logprobs is None and not body.return_token_ids
        self._has_begun = [False] * prepared.generation.params.n
        self._readers = [] if prepared.form is None else [prepared.form.make_reader() for _ in self._has_begun]
        self._thoughts = [""] * len(self._has_begun)

    def usage_of(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._prepared.usage_of(outputs[0], self._thoughts)

    def events_of(self, delta: TextDelta) -> bytes:
        """Return a choice's events: the role first, then what is new, then the finish reason once it has ended."""
        events = b""
        if delta.prompt_logprobs is not None and self._prepared.body.prompt_logprobs is not None:
            events = self.chunk(b"", prompt_logprobs=logprobs.of_prompt(delta.prompt_logprobs))
        if not self._has_begun[delta.index]:
            self._has_begun[delta.index] = True
            events += self._event(delta.index, {"role": "assistant", "content": None if self._readers else ""})
        if self._readers:
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
        """Return what is new. What belongs to tokens, not to text, goes with the first event."""
        reader = self._readers[delta.index]
        pieces = reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        self._thoughts[delta.index] += "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        deltas = list(map(delta_of, self._prepared.shown(pieces)))
        if self._is_plain:
            return b"".join(self._event(delta.index, each) for each in deltas)
        first, *others = deltas or [{}]
        events = self._event(delta.index, first, **self._extras(delta))
        return events + b"".join(self._event(delta.index, each) for each in others)

    def _reason(self, delta: TextDelta) -> str | None:
        if not self._readers:
            return delta.finish_reason
        return finish_reason_of(self._readers[delta.index], delta.finish_reason)

    def _extras(self, delta: TextDelta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": _logprobs(self._prepared, delta)}
        if self._prepared.body.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _event(self, index: int, delta: dict[str, Any], **others: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **others}
        return self.chunk(to_json(choice))
