"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's: decides how they are answered, also in a stream."""

import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.outputs import RequestOutput, TextDelta
from inflight.server import messages_errors
from inflight.server.chunks import to_json
from inflight.server.client import Client, attended
from inflight.server.event_stream import EventStream, Write
from inflight.server.generation import Job, generate
from inflight.server.json_route import JsonRoute
from inflight.server.messages_request import CountRequest, MessagesRequest
from inflight.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, as Anthropic does."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        asked = await _read(body, service)
        if not body.stream:
            return _answer(asked, (await generate(service, asked.job, client))[0])

    async def write_all(client: Client, write: Write) -> None:
        events = _Events(asked)

        async def deliver(deltas: list[TextDelta]) -> None:
            if news := events.of(deltas):
                await write(news)

        await write(events.end((await generate(service, asked.job, client, deliver))[0]))

    return EventStream(write_all, service.settings, partial(messages_errors.event, request=request))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """How many tokens a chat is."""
    service = service_of(request)
    service.check_model(body.model)
    token_ids = await service.tokenize(body.for_template(), body.num_characters, "messages")
    return Response(to_json({"input_tokens": len(token_ids)}), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that can be run; `head` is what its answer begins with."""

    job: Job
    max_tokens: int
    head: dict[str, Any]


async def _read(body: MessagesRequest, service: Service) -> _Asked:
    service.check_model(body.model)
    info = await service.model_info()
    params = body.sampling_params(service.llm.get_default_sampling_params())
    token_ids = await service.tokenize(body.for_template(), body.num_characters, "messages")
    prompt = service.fitted(token_ids, info, "messages")
    message_id = f"msg_{uuid.uuid4().hex}"
    head = {"id": message_id, "type": "message", "role": "assistant", "model": service.settings.model_name}
    return _Asked(Job(message_id, [prompt], params), body.max_tokens, head)


def _answer(asked: _Asked, output: RequestOutput) -> Response:
    content = [{"type": "text", "text": output.outputs[0].text}]
    answer = {**asked.head, "content": content, **_ending(asked, output), "usage": _usage_of(output)}
    return Response(to_json(answer), media_type="application/json")


def _ending(asked: _Asked, output: RequestOutput) -> dict[str, str | None]:
    """Why it ended; tokens that stop it have no name here."""
    (completion,) = output.outputs
    if completion.finish_reason == "length":
        is_full = len(completion.token_ids) < asked.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_of(output: RequestOutput) -> dict[str, int]:
    num_cached = output.metrics.num_cached_tokens
    return _usage(len(output.prompt_token_ids), len(output.outputs[0].token_ids), num_cached)


def _usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, int]:
    """`usage`; tokens that were found in the prefix cache are counted apart from the rest of the prompt's."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


class _Events:
    """The events of one answer. (How much of the prompt was cached is known at the end; the usage there counts.)"""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._has_begun = False

    def of(self, deltas: list[TextDelta]) -> bytes:
        """The events for these; none, if they add nothing that can be shown yet."""
        begin = b"" if self._has_begun else self._begin(len(deltas[0].token_ids))
        self._has_begun = True
        return begin + b"".join(_TEXT % to_json(delta.text) for delta in deltas if delta.text)

    def end(self, output: RequestOutput) -> bytes:
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=_ending(self._asked, output), usage=_usage_of(output))
            + _event("message_stop")
        )

    def _begin(self, num_tokens: int) -> bytes:
        num_prompt = len(self._asked.job.prompts[0])
        nothing_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._asked.head, **nothing_yet, "usage": _usage(num_prompt, num_tokens)}
        return (
            _event("message_start", message=message)
            + _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            + _event("ping")
        )


_TEXT = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%b}}\n\n'
)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))
