"""`/v1/responses`: creates, continues, retrieves and deletes responses."""

from functools import partial

from fastapi import Request
from starlette.responses import JSONResponse, Response

from inflight.server.responses.answer import ResponseAnswer
from inflight.server.responses.request import ResponsesRequest
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.chat import answer_chat
from inflight.server.wire.api_errors import ApiError


async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation."""
    store = _store_of(request)
    earlier = _earlier(body, store)
    if earlier is None:
        return await answer_chat(body, request, partial(ResponseAnswer, store=store, earlier=()))
    make = partial(ResponseAnswer, store=store, earlier=earlier.chat)
    return await answer_chat(body, request, make, earlier.num_bytes)


async def get_response(response_id: str, request: Request) -> Response:
    """Return a stored response."""
    for name in request.query_params:
        raise ApiError(400, f"there is no parameter {name[:200]!r}; a response is returned as it was sent", param=name)
    response = _store_of(request).get(response_id)
    if response is None:
        raise _gone(response_id)
    return Response(response.answer, media_type="application/json")


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
