"""`/v1/responses`: decides how responses are made from a conversation, answered whole, kept, got and deleted.

How one is told in a stream is up to `responses_events`.
"""

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight.outputs import TextDelta
from inflight.server.api_errors import ApiError
from inflight.server.chunks import to_json
from inflight.server.client import Client, attended
from inflight.server.event_stream import EventStream, Write
from inflight.server.generation import Job, generate
from inflight.server.json_route import JsonRoute
from inflight.server.responses_answer import Asked, finished
from inflight.server.responses_events import ResponseEvents
from inflight.server.responses_request import Chat, ResponsesRequest
from inflight.server.responses_store import ResponseStore, StoredResponse
from inflight.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)

SHARE_FOR_OUTPUT = 4
"""When turns are left out of a conversation that is too long, so many are that this part of the context is free."""


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, store = service_of(request), _store_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        asked = await _read(body, service, store)
        if not body.stream:
            (output,) = await generate(service, asked.job, client)
            answer = to_json(finished(asked, output))
            _keep(asked, answer, output.outputs[0].text, store)
            return Response(answer, media_type="application/json")
    events = ResponseEvents(asked)

    async def write_all(client: Client, write: Write) -> None:
        async def deliver(deltas: list[TextDelta]) -> None:
            if news := events.of(deltas):
                await write(news)

        (output,) = await generate(service, asked.job, client, deliver)
        answer = finished(asked, output)
        _keep(asked, to_json(answer), output.outputs[0].text, store)
        await write(events.end(answer))

    return EventStream(write_all, service.settings, events.failed)


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> Response:
    """A response that was kept."""
    for name in request.query_params:
        raise ApiError(400, f"there is no parameter {name[:200]!r}; a response is got as it was answered", param=name)
    response = _store_of(request).get(response_id)
    if response is None:
        raise _gone(response_id)
    return Response(response.answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    if not _store_of(request).delete(response_id):
        raise _gone(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _gone(response_id: str) -> ApiError:
    return ApiError(404, _why_gone(response_id), param="response_id", code="response_not_found")


def _why_gone(response_id: str) -> str:
    return (
        f"there is no response {response_id[:200]!r}: it was never kept, was deleted, or had to make room for others; "
        "responses are kept in memory, the least recently used are dropped first"
    )


async def _read(body: ResponsesRequest, service: Service, store: ResponseStore) -> Asked:
    service.check_model(body.model)
    body.check(service.settings)
    info = await service.model_info()
    params = body.sampling_params(service.llm.get_default_sampling_params())
    earlier: Chat = ()
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id)
        if previous is None:
            message = _why_gone(body.previous_response_id)
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        earlier = previous.chat
    chat = (*earlier, *body.messages)
    prompt = await _prompt(body, chat, service, info.max_model_len)
    response_id = f"resp_{uuid.uuid4().hex}"
    return Asked(
        body=body,
        job=Job(response_id, [service.fitted(prompt, info, "input")], params),
        chat=chat,
        tokenizer=service.llm.tokenizer,
        model_name=service.settings.model_name,
        created_at=int(time.time()),
        item_id=f"msg_{uuid.uuid4().hex}",
    )


async def _prompt(body: ResponsesRequest, chat: Chat, service: Service, max_model_len: int) -> list[int]:
    """The token ids of the conversation; of its later turns, if it is too long and that is wanted."""
    told: Chat = () if body.instructions is None else ({"role": "system", "content": body.instructions},)
    tokens = await _tokens((*told, *chat), service)
    if body.truncation != "auto" or len(tokens) < max_model_len:
        return tokens
    most = max_model_len - max_model_len // SHARE_FOR_OUTPUT
    begins = [i for i, message in enumerate(chat) if message["role"] == "user"]
    first, last = 1, len(begins) - 1  # of those between, the first turn from which on it fits; else the last
    while first <= last:
        middle = (first + last) // 2
        kept = tuple(message for message in chat[: begins[middle]] if message["role"] == "system")
        tokens = await _tokens((*told, *kept, *chat[begins[middle] :]), service)
        if first == last:
            break
        first, last = (first, middle) if len(tokens) <= most else (middle + 1, last)
    return tokens


async def _tokens(chat: Chat, service: Service) -> list[int]:
    num_characters = sum(len(message["content"]) for message in chat)
    return await service.tokenize({"messages": chat, "add_generation_prompt": True}, num_characters, "input")


def _keep(asked: Asked, answer: bytes, text: str, store: ResponseStore) -> None:
    if asked.body.store is not False:
        chat = (*asked.chat, {"role": "assistant", "content": text})
        store.put(asked.job.request_id, StoredResponse(answer, chat))
