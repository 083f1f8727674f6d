"""`/v1/responses`: creates, continues, retrieves, cancels, compacts and deletes responses."""

import asyncio
import json
from functools import partial
from typing import Literal

from fastapi import Request
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response

from inflight.server.responses.answer import ResponseAnswer
from inflight.server.responses.background import BackgroundRun
from inflight.server.responses.compaction import CompactAnswer, CompactRequest
from inflight.server.responses.request import ITEMS, Chat, ResponsesRequest, messages_of
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.chat import answer_chat, prepared
from inflight.server.serving.service import service_of
from inflight.server.wire.api_errors import ApiError

CONVERSATION = "conv_"
"""The prefix of conversations' ids."""


async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    store = store_of(request)
    earlier, num_bytes = _earlier(body, store)
    make = partial(ResponseAnswer, store=store, earlier=earlier)
    if not body.background or service_of(request).in_background:
        return await answer_chat(body, request, make, num_bytes)
    answer = await prepared(body, request, make, num_bytes)
    run = BackgroundRun(answer, service_of(request), store)
    # The request lasts until the response is stored: a server that drains waits for it, and the model stays loaded.
    until_stored = BackgroundTask(asyncio.wait, [run.task])
    return Response(run.shown(), media_type="application/json", background=until_stored)


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
    run = store.running.get(response_id)
    answer = stored("response", response_id, store, "response_id").answer if run is None else run.shown()
    return Response(answer, media_type="application/json")


async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response that runs in the background, and return it; one that has ended stays as it is."""
    answer = (await _ended(response_id, store_of(request))).answer
    if not json.loads(answer)["background"]:
        message = f"{response_id} does not run in the background; only such responses can be cancelled"
        raise ApiError(400, message, param="response_id")
    return Response(answer, media_type="application/json")


async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response."""
    await _ended(response_id, store_of(request))
    store_of(request).delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def store_of(request: Request) -> ResponseStore:
    """The server's store."""
    store: ResponseStore = request.app.state.responses
    return store


def stored(
    what: Literal["response", "conversation"], its_id: str, store: ResponseStore, param: str, status: int = 404
) -> StoredResponse:
    """Return a response or a conversation. Raises `ApiError` if it is gone."""
    is_one = its_id.startswith(CONVERSATION) == (what == "conversation")
    if not is_one or (entry := store.get(its_id)) is None:
        message = (
            f"there is no {what} {its_id[:200]!r}: it was never stored, is not finished, was deleted, or had to make "
            "room for others; the least recently used are dropped first"
        )
        raise ApiError(status, message, param=param, code=f"{param.removesuffix('_id')}_not_found")
    return entry


async def _ended(response_id: str, store: ResponseStore) -> StoredResponse:
    """Return a response that runs no longer. Raises `ApiError`."""
    if (run := store.running.get(response_id)) is not None:
        run.task.cancel()
        await asyncio.wait([run.task])
    return stored("response", response_id, store, "response_id")


def _earlier(body: ResponsesRequest, store: ResponseStore) -> tuple[Chat, int]:
    """Return the messages that the request continues, and their size. Raises `ApiError` if they are gone."""
    if body.conversation is not None and body.previous_response_id is not None:
        message = "conversation and previous_response_id are both given; a response continues one of them"
        raise ApiError(400, message, param="conversation")
    if body.conversation is not None:
        known = stored("conversation", body.conversation, store, "conversation")
        return messages_of(ITEMS.validate_python(known.chat, strict=False)), known.num_bytes
    if body.previous_response_id is None:
        return (), 0
    previous = stored("response", body.previous_response_id, store, "previous_response_id", 400)
    return previous.chat, previous.num_bytes
