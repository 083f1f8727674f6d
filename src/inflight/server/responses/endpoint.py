"""`/v1/responses`: decides how a response is made from a conversation, stored, retrieved and deleted.

`events` decides how a response is streamed.
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight.contracts.outputs import RequestOutput
from inflight.server.responses.answer import PreparedResponse, finished, message_of
from inflight.server.responses.events import ResponseEvents
from inflight.server.responses.request import Chat, ResponsesRequest
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.generation import Job, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
from inflight.server.tools.blocks import Block, Blocks
from inflight.server.tools.in_templates import with_calls_joined, with_names
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json

router = APIRouter(route_class=JsonRoute)

SHARE_FOR_OUTPUT = 4
"""If turns of a conversation that is too long are left out, enough are to leave 1/`SHARE_FOR_OUTPUT` of the context
free."""


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, store = service_of(request), _store_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        prepared = await _prepare(body, service, store)
        if not body.stream:
            (output,) = await generate(service, prepared.job, client)
            blocks = Blocks(prepared.tools)
            blocks.feed(output.outputs[0].text, is_last=True)
            answer = _kept(prepared, output, blocks.blocks, store)
            return Response(to_json(answer), media_type="application/json")
    events = ResponseEvents(prepared, partial(_kept, prepared, store=store))
    return stream(service, prepared.job, events, events.failed)


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> Response:
    """Return a stored response."""
    for name in request.query_params:
        raise ApiError(400, f"there is no parameter {name[:200]!r}; a response is returned as it was sent", param=name)
    response = _store_of(request).get(response_id)
    if response is None:
        raise _gone(response_id)
    return Response(response.answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response."""
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
        f"there is no response {response_id[:200]!r}: it was never stored, was deleted, or had to make room for "
        "others; responses are kept in memory, and the least recently used are dropped first"
    )


async def _prepare(body: ResponsesRequest, service: Service, store: ResponseStore) -> PreparedResponse:
    service.check_model(body.model)
    body.check(service.settings)
    info = await service.model_info()
    tools = service.tool_use(body.tool_fields, body.structured_output)
    options = {} if tools is None else tools.sampling_options
    params = body.sampling_params(service.llm.get_default_sampling_params(), **options)
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
    return PreparedResponse(
        body=body,
        job=Job(response_id, [service.fitted(prompt, info, "input")], params),
        chat=chat,
        tokenizer=service.llm.tokenizer,
        model_name=service.settings.model_name,
        tools=tools,
        created_at=int(time.time()),
    )


async def _prompt(body: ResponsesRequest, chat: Chat, service: Service, max_model_len: int) -> list[int]:
    """Return the token ids of the conversation; if it is too long and `truncation` allows it, of its later turns."""
    system: Chat = () if body.instructions is None else ({"role": "system", "content": body.instructions},)
    tools = [tool.for_template() for tool in body.tool_fields.usable_tools]
    tokens = await _tokens((*system, *chat), tools, service)
    if body.truncation != "auto" or len(tokens) < max_model_len:
        return tokens
    most = max_model_len - max_model_len // SHARE_FOR_OUTPUT
    begins = [i for i, message in enumerate(chat) if message["role"] == "user"]
    first, last = 1, len(begins) - 1  # finds the first turn from which the rest fits, else the last turn
    while first <= last:
        middle = (first + last) // 2
        kept = tuple(message for message in chat[: begins[middle]] if message["role"] == "system")
        tokens = await _tokens((*system, *kept, *chat[begins[middle] :]), tools, service)
        if first == last:
            break
        first, last = (first, middle) if len(tokens) <= most else (middle + 1, last)
    return tokens


async def _tokens(chat: Chat, tools: list[dict[str, Any]], service: Service) -> list[int]:
    prompt = {"messages": with_names(with_calls_joined(chat)), "add_generation_prompt": True}
    num_characters = sum(len(message["content"]) for message in chat)
    return await service.tokenize({**prompt, "tools": tools} if tools else prompt, num_characters, "input")


def _kept(
    prepared: PreparedResponse, output: RequestOutput, blocks: Sequence[Block], store: ResponseStore
) -> dict[str, Any]:
    """Return the finished response, and store it unless the request declines."""
    answer = finished(prepared, output, blocks)
    if prepared.body.store is not False:
        chat = (*prepared.chat, *map(message_of, blocks))
        store.put(prepared.job.request_id, StoredResponse(to_json(answer), chat))
    return answer
