"""Request ids: the client's own if it is sane, else a new one; in the response, in the scope and in every log line.

Decides what counts as sane. The engine's `request_id`s are different: one HTTP request may have several of those.
"""

import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.server.operations.middleware import Middleware
from inflight.server.operations.refusals import header_of

SANE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Ids that are accepted from clients; they go into headers and logs, where they must do no harm."""

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""The id of the HTTP request that is being served in this context."""


class RequestIds(Middleware):
    """Gives each request an id: in `scope["state"]["request_id"]`, in `current_request_id`, and in two headers.

    (OpenAI's clients read `x-request-id`, Anthropic's read `request-id`.)
    """

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        given = header_of(scope, b"x-request-id")
        name = given if given is not None and SANE.fullmatch(given) else b"req_" + uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        current_request_id.set(name.decode())  # for this request's task and the tasks that it starts

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-request-id", name), (b"request-id", name)]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await app(scope, receive, send_named)
