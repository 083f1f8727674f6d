"""`/v1/responses`: creates, continues, retrieves, cancels, compacts and deletes responses."""

import json
from functools import partial

from fastapi import Request
from starlette.responses import JSONResponse, Response

from inflight.server.responses.answer import ResponseAnswer
from inflight.server.responses.background import BackgroundRun
from inflight.server.responses.compaction import CompactAnswer, CompactRequest
from inflight.server.responses.request import ITEMS, Chat, ResponsesRequest, messages_of
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.chat import answer_chat, prepared
from inflight.server.serving.service import service_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import json_response

CONVERSATION = "conv_"
"""The prefix of conversations' ids."""


async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    store = store_of(request)
    earlier, num_bytes = _earlier(body, store)
    make = partial(ResponseAnswer, store=store, earlier=earlier)
    if not body.background:
        return await answer_chat(body, request, make, num_bytes)
    answer = await prepared(body, request, make, num_bytes)
    return BackgroundRun(answer, service_of(request), store).response()


async def compact_response(body: CompactRequest, request: Request) -> Response:
    """Replace a conversation by its user's messages and a summary, which the model writes."""
    asked = body.asked
    earlier, num_bytes = _earlier(asked, store := store_of(request))
    return await answer_chat(asked, request, partial(CompactAnswer, store=store, earlier=earlier), num_bytes)


async def get_response(response_id: str, request: Request) -> Response:
    """Return a stored response."""
    for name in request.query_params:
        raise ApiError(400, f"there is no parameter {name[:200]!r}; a response is returned as it was sent", param=name)
    store = store_of(request)
    if (run := store.running.get(response_id)) is not None:
        return json_response(run.shown())
    return Response(_stored(response_id, store).answer, media_type="application/json")


async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response that runs in the background, and return it; one that has ended stays as it is."""
    store = store_of(request)
    if (run := store.running.get(response_id)) is not None:
        await run.cancel()
    answer = _stored(response_id, store).answer
    if not json.loads(answer)["background"]:
        message = f"{response_id} does not run in the background; only such responses can be cancelled"
        raise ApiError(400, message, param="response_id")
    return Response(answer, media_type="application/json")


async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response."""
    store = store_of(request)
    if (run := store.running.get(response_id)) is not None:
        await run.cancel()
    _stored(response_id, store)
    store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def store_of(request: Request) -> ResponseStore:
    """The server's store."""
    store: ResponseStore = request.app.state.responses
    return store


def _stored(response_id: str, store: ResponseStore) -> StoredResponse:
    """Return a response. Raises `ApiError`."""
    if response_id.startswith(CONVERSATION) or (stored := store.get(response_id)) is None:
        raise ApiError(404, _why_gone("response", response_id), param="response_id", code="response_not_found")
    return stored


def stored_conversation(conversation_id: str, store: ResponseStore) -> StoredResponse:
    """Return a conversation. Raises `ApiError`."""
    if not conversation_id.startswith(CONVERSATION) or (stored := store.get(conversation_id)) is None:
        message = _why_gone("conversation", conversation_id)
        raise ApiError(404, message, param="conversation", code="conversation_not_found")
    return stored


def _why_gone(what: str, its_id: str) -> str:
    return (
        f"there is no {what} {its_id[:200]!r}: it was never stored, is not finished, was deleted, or had to make room "
        "for others; the least recently used are dropped first"
    )


def _earlier(body: ResponsesRequest, store: ResponseStore) -> tuple[Chat, int]:
    """Return the messages that the request continues, and their size. Raises `ApiError` if they are gone."""
    if body.conversation_id is not None and body.previous_response_id is not None:
        message = "conversation and previous_response_id are both given; a response continues one of them"
        raise ApiError(400, message, param="conversation")
    if body.conversation_id is not None:
        known = stored_conversation(body.conversation_id, store)
        return messages_of(ITEMS.validate_python(known.chat, strict=False)) if known.chat else (), known.num_bytes
    if body.previous_response_id is None:
        return (), 0
    previous = store.get(body.previous_response_id)
    if previous is None:
        message = _why_gone("response", body.previous_response_id)
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    return previous.chat, previous.num_bytes
