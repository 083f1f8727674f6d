"""`/v1/conversations`: stored conversations, which responses continue and are added to."""

import time
import uuid
from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import Response

from inflight.server.openai.chat_request import MAX_MESSAGES
from inflight.server.openai.sampling_fields import MAX_METADATA
from inflight.server.responses.endpoint import CONVERSATION, store_of, stored
from inflight.server.responses.request import InputItem, stored_items
from inflight.server.responses.store import StoredResponse
from inflight.server.wire.json_route import json_response, to_json
from inflight.server.wire.strict_model import Many, StrictModel


class ConversationRequest(StrictModel):
    """The body of a request for a new conversation, or for more items of one."""

    MAY_HAVE_MORE = True

    items: Annotated[Many[InputItem], Field(max_length=MAX_MESSAGES)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None


async def create(body: ConversationRequest, request: Request) -> Response:
    """Store a conversation."""
    conversation = {
        "id": f"{CONVERSATION}{uuid.uuid4().hex}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    entry = StoredResponse(to_json(conversation), tuple(stored_items(body.items or [])))
    store_of(request).put(str(conversation["id"]), entry)
    return json_response(conversation)


async def retrieve(conversation_id: str, request: Request) -> Response:
    """Return a conversation, without its items."""
    return Response(_known(conversation_id, request).answer, media_type="application/json")


async def delete(conversation_id: str, request: Request) -> Response:
    """Delete a conversation; its responses stay."""
    _known(conversation_id, request)
    store_of(request).delete(conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(conversation_id: str, body: ConversationRequest, request: Request) -> Response:
    """Add items to a conversation."""
    _known(conversation_id, request)
    added = stored_items(body.items or [])
    store_of(request).extend(conversation_id, added)
    return json_response(_listed(added, has_more=False))


async def list_items(
    conversation_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    after: str | None = None,
) -> Response:
    """Return a page of a conversation's items."""
    items = list(_known(conversation_id, request).chat)
    items = items if order == "asc" else items[::-1]
    begin = next((i + 1 for i, each in enumerate(items) if each["id"] == after), 0)
    return json_response(_listed(items[begin : begin + limit], has_more=len(items) > begin + limit))


def _known(conversation_id: str, request: Request) -> StoredResponse:
    """Return a conversation. Raises `ApiError`."""
    return stored("conversation", conversation_id, store_of(request), "conversation")


def _listed(items: list[Any], *, has_more: bool) -> dict[str, Any]:
    ids = [each["id"] for each in items] or [None]
    return {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
