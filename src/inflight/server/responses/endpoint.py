"""`/v1/responses`: decides how a response is made from a conversation, stored, retrieved and deleted.

`events` decides how a response is streamed.
"""

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import RequestOutput
from inflight.server.chat_format.blocks import Blocks
from inflight.server.chat_format.tools import with_calls_joined, with_names
from inflight.server.openai.chat_request import check_variables
from inflight.server.openai.usage import size_of_answer
from inflight.server.responses.answer import PreparedResponse, finished, message_of, read_whole
from inflight.server.responses.events import ResponseEvents
from inflight.server.responses.request import Chat, ResponsesRequest
from inflight.server.responses.scored_blocks import ScoredBlocks
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, WrittenChat, service_of
from inflight.server.serving.streaming import stream
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json
from inflight.server.wire.off_loop import off_loop

router = APIRouter(route_class=JsonRoute)

SHARE_FOR_OUTPUT = 4
"""If turns of a conversation that is too long are left out, enough are to leave 1/`SHARE_FOR_OUTPUT` of the context
free."""


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, store = service_of(request), _store_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        service.adapter_of(body.model)
        info = await service.generating_info()
        earlier = _earlier(body, store)
        size = len(await request.body()) + (0 if earlier is None else earlier.num_bytes)
        chat: Chat = () if earlier is None else earlier.chat
        prepared = await off_loop(size, lambda: _prepare(body, chat, service, info))
        if not body.stream:
            (output,) = await generate(service, prepared.generation, client)
            answer, kept = await off_loop(size + size_of_answer([output]), lambda: _answer(prepared, output))
            if body.store is not False:
                store.put(prepared.generation.request_id, kept)
            return Response(answer, media_type="application/json")
    events = ResponseEvents(prepared, partial(_kept, prepared, store=store))
    return stream(service, prepared.generation, events, events.failed)


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


def _earlier(body: ResponsesRequest, store: ResponseStore) -> StoredResponse | None:
    """Return the response that the request continues. Raises `ApiError` if it is gone."""
    if body.previous_response_id is None:
        return None
    previous = store.get(body.previous_response_id)
    if previous is None:
        message = _why_gone(body.previous_response_id)
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    return previous


def _prepare(body: ResponsesRequest, earlier: Chat, service: Service, info: ModelInfo) -> PreparedResponse:
    body.check(service.settings)
    chat = (*earlier, *body.messages)
    text, token_ids = _prompt(body, chat, service, info)
    form = service.answer_form(body.tool_fields, body.structured_output, text, body.thinking)
    options = {} if form is None else form.sampling_options
    params = body.sampling_params(service.llm.get_default_sampling_params(), info.vocab_size, **options)
    response_id = f"resp_{uuid.uuid4().hex}"
    return PreparedResponse(
        body=body,
        generation=Generation(
            response_id,
            [service.fitted(token_ids, info, "input")],
            params,
            body.priority or 0,
            body.cache_salt,
            service.adapter_of(body.model),
        ),
        chat=chat,
        tokenizer=service.llm.tokenizer,
        model_name=service.name_of(service.adapter_of(body.model)),
        form=form,
        created_at=int(time.time()),
    )


def _prompt(body: ResponsesRequest, chat: Chat, service: Service, info: ModelInfo) -> WrittenChat:
    """Return the conversation as the model gets it; if it is too long and `truncation` allows it, its later turns."""
    system: Chat = () if body.instructions is None else ({"role": "system", "content": body.instructions},)
    tools = [tool.for_template() for tool in body.tool_fields.usable_tools]
    whole = (*system, *chat)

    def write(messages: Chat) -> WrittenChat:
        prompt: dict[str, Any] = {"messages": with_names(with_calls_joined(messages)), "add_generation_prompt": True}
        if body.chat_template_kwargs:
            check_variables(body.chat_template_kwargs)
            prompt["chat_template_kwargs"] = body.chat_template_kwargs
        return service.written({**prompt, "tools": tools} if tools else prompt, info, "input", body.thinking)

    if body.truncation != "auto":
        return write(whole)
    written = _unless_long(write, whole)
    if written is not None and len(written.token_ids) < info.max_model_len:
        return written
    most = info.max_model_len - info.max_model_len // SHARE_FOR_OUTPUT
    begins = [i for i, message in enumerate(chat) if message["role"] == "user"]
    first, last = 1, len(begins) - 1  # finds the first turn from which the rest fits, else the last turn
    while first <= last:
        middle = (first + last) // 2
        kept = tuple(message for message in chat[: begins[middle]] if message["role"] == "system")
        whole = (*system, *kept, *chat[begins[middle] :])
        written = _unless_long(write, whole)
        if first == last:
            break
        fits = written is not None and len(written.token_ids) <= most
        first, last = (first, middle) if fits else (middle + 1, last)
    return write(whole) if written is None else written


def _unless_long(write: Callable[[Chat], WrittenChat], chat: Chat) -> WrittenChat | None:
    """Return the chat; None for one whose text is so long that its tokens need not even be counted."""
    try:
        return write(chat)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None


def _answer(prepared: PreparedResponse, output: RequestOutput) -> tuple[bytes, StoredResponse]:
    """Return the finished response in JSON, and as it would be stored."""
    blocks = read_whole(prepared, output)
    answer = to_json(finished(prepared, output, blocks))
    return answer, StoredResponse(answer, _chat_with(prepared, blocks))


def _chat_with(prepared: PreparedResponse, blocks: Blocks) -> Chat:
    return (*prepared.chat, *map(message_of, blocks.blocks))


def _kept(
    prepared: PreparedResponse, output: RequestOutput, blocks: ScoredBlocks, store: ResponseStore
) -> dict[str, Any]:
    """Return the finished response, and store it unless the request declines."""
    answer = finished(prepared, output, blocks)
    if prepared.body.store is not False:
        store.put(prepared.generation.request_id, StoredResponse(to_json(answer), _chat_with(prepared, blocks)))
    return answer
