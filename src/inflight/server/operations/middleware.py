"""`Middleware`: the base class of ASGI middleware; request ids, observation and refusals."""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.server.endpoints import errors_of_path
from inflight.server.operations.logs import current_request_id
from inflight.server.wire.api_errors import CLIENT_CLOSED_REQUEST, ApiError, path_of

SANE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Accepted ids from clients; they go into headers and logs."""

MODEL = "model"
"""The key in a request's state for the name of its model, with several models."""


class Middleware(ABC):
    """Wraps an application.

    Attributes:
        SCOPES: the ASGI scopes that it handles; others go straight to the application.
    """

    SCOPES: ClassVar[tuple[str, ...]] = ("http",)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return the application with this around it."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in self.SCOPES:
                await self.serve(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return handle

    @abstractmethod
    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application answer it."""


def model_of(scope: Scope) -> str | None:
    """Return the name of that model; None: a single model, or none reached."""
    name: str | None = scope.get("state", {}).get(MODEL)
    return name


async def run_watched(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, answered: Callable[[int], None]
) -> None:
    """Run an application for one request and finally call `answered` with the status."""
    status = CLIENT_CLOSED_REQUEST

    async def send_watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, send_watched)
    except Exception:
        status = 500 if status == CLIENT_CLOSED_REQUEST else status
        raise
    finally:
        answered(status)


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with that name (in lower case), if there is one."""
    return next((value for given, value in scope["headers"] if given == name), None)


def refusal(scope: Scope, error: ApiError) -> Response:
    """Return an answer that refuses a request, in the envelope that its client expects."""
    return errors_of_path(path_of(scope)).response(error, scope)


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Refuse a request."""
    await refusal(scope, error)(scope, receive, send)


class RequestIds(Middleware):
    """Gives each request an id: in `scope["state"]["request_id"]`, in `current_request_id`, and in two headers.

    The engine's `request_id`s are different: one HTTP request may have several of those.
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


class RootPath(Middleware):
    """Puts the application under a path; a proxy may have stripped it."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        root, path = self._root_path, scope["path"]
        if path == root:  # the page's links are relative
            query = scope["query_string"].decode("latin-1")
            await RedirectResponse(f"{root}/{f'?{query}' if query else ''}")(scope, receive, send)
            return
        path = path if path.startswith(f"{root}/") else root + path
        await app({**scope, "root_path": root, "path": path}, receive, send)
