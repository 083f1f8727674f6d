"""Routes requests to models: `ModelRoute` forwards a client's request to its model's application once loaded,
`PoolAnswerer` does so for batch jobs.

A waiting stream gets keep-alive comments, and so begins before its outcome is known; an error is then its last event.
Each request keeps its model loaded, from its arrival to the last byte of its answer.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from inflight.contracts.api.errors import ModelError
from inflight.server.batches.answering import AppAnswerer
from inflight.server.models.loading import ServedModel
from inflight.server.models.pool import ModelPool, UnavailableError, Use
from inflight.server.operations.middleware import MODEL
from inflight.server.serving.service import settings_of
from inflight.server.serving.settings import ServerSettings
from inflight.server.serving.streams import KEEP_ALIVE, attended
from inflight.server.wire.api_errors import OPENAI_ERRORS, ApiError, ClientGoneError, errors_of
from inflight.server.wire.json_route import not_json
from inflight.server.wire.off_loop import off_loop

FAILED = 500
"""The status if a request's model could not be loaded: unlike a 503, clients do not retry it."""

_OF_ASGI = frozenset(
    [
        *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
        *("headers", "client", "server", "state"),
    ]
)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ModelRoute(APIRoute):
    """A route whose requests are answered by the model's application. One without a body names it in the query."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        may_stream = field is not None and "stream" in getattr(field.field_info.annotation, "model_fields", ())

        async def hand_on(request: Request) -> Response:
            pool: ModelPool[ServedModel] = request.app.state.models
            name: object = request.query_params.get("model")
            body, streams = await request.body(), False
            if field is not None:
                name, streams = await off_loop(len(body), lambda: read_choice(body))
            model_name = chosen(pool, name)
            request.scope.setdefault("state", {})[MODEL] = model_name
            return _ForwardedResponse(pool, model_name, body, settings_of(request), streams=streams and may_stream)

        return hand_on


class _ForwardedResponse(Response):
    """The answer of a model's application.

    Args:
        streams: whether the client expects a stream, and may be sent comments.
    """

    def __init__(
        self, pool: ModelPool[ServedModel], name: str, body: bytes, settings: ServerSettings, *, streams: bool
    ) -> None:
        super().__init__()
        self._pool, self._name, self._request_body, self._settings = pool, name, body, settings
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _EarlyStream(scope, send)
        try:
            with self._pool.use(self._name) as use:
                if not use.is_admitted:
                    await self._wait(use, receive, stream)
                model = await use.model()
                answer = stream.send if stream.has_begun else send
                await model.app(own_scope(scope), again(self._request_body, receive), answer)
        except ClientGoneError:
            if not stream.has_begun:
                raise
        except (ApiError, ModelError) as error:
            if not stream.has_begun:
                raise _answer_to(error) from error
            await stream.fail(_answer_to(error))

    async def _wait(self, use: Use[ServedModel], receive: Receive, stream: "_EarlyStream") -> None:
        """Wait for the model. Raises the load's error, `ClientGoneError`, and `ApiError` (504)."""
        interval = self._settings.keep_alive_interval if self._streams else None
        async with attended(receive, self._settings.request_timeout):
            while not use.is_admitted:
                try:
                    async with asyncio.timeout(interval):
                        await use.model()
                except TimeoutError:
                    await stream.keep_alive()


class _EarlyStream:
    """A stream that may begin before the application that writes it.

    Attributes:
        has_begun: whether its status was sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_begun = False
        self._scope, self._send, self._errors = scope, send, errors_of(scope)
        self._error: bytearray | None = None  # not a stream

    async def keep_alive(self) -> None:
        """Send a comment."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def send(self, message: Message) -> None:
        """Send a part of the application's answer; if it is not a stream, it is an error, and becomes an event."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._error = None if headers.get(b"content-type", b"").startswith(b"text/event-stream") else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(bytes(self._error))

    async def fail(self, error: ApiError) -> None:
        """End with an error."""
        await self._end(self._errors.body(error, self._scope))

    async def _end(self, error: bytes) -> None:
        await self._send({"type": "http.response.body", "body": self._errors.event(error), "more_body": False})


def _answer_to(error: ApiError | ModelError) -> ApiError:
    answer = ApiError.from_exception(error)
    if isinstance(error, UnavailableError):
        answer.headers["Retry-After"] = str(math.ceil(error.seconds))
    return answer


def own_scope(scope: Scope) -> Scope:
    """The ASGI scope for a model's application, without the outer application's routing state."""
    return {key: value for key, value in scope.items() if key in _OF_ASGI}


def again(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` for a request whose body was read."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


class PoolAnswerer:
    """See `batches.worker.Answerer`."""

    def __init__(self, pool: ModelPool[ServedModel]) -> None:
        self._pool = pool

    async def wait_until_ready(self) -> None:
        """Return at once: each request waits for its model."""

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """See `AppAnswerer.answer`."""
        try:
            name, _ = await off_loop(len(body), lambda: read_choice(body))
            with self._pool.use(chosen(self._pool, name)) as use:
                model = await use.model()
                return await AppAnswerer(model.background, model.llm).answer(url, body)
        except ApiError as error:
            return error.status, OPENAI_ERRORS.body(error, {})
        except ModelError as error:
            answer = ApiError.from_exception(error)
            return answer.status if isinstance(error, UnavailableError) else FAILED, OPENAI_ERRORS.body(answer, {})


class _Wanted(msgspec.Struct):
    """The fields `model` and `stream` of a body; all else is skipped."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


def read_choice(body: bytes) -> tuple[object, bool]:
    """Return a body's `model`, unvalidated, and whether it wants a stream. Raises `ApiError`."""
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object")
    try:
        wanted = msgspec.json.decode(body, type=_Wanted)
        return msgspec.json.decode(wanted.model), bytes(wanted.stream) == b"true"
    except msgspec.ValidationError as error:
        raise ApiError(400, "the body must be a JSON object") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(body, error) from error


def chosen(pool: ModelPool[Any], name: object) -> str:
    """Return the name of a request's model, which may be given by an adapter. Raises `ApiError` if it is unknown, or
    missing with several models."""
    names = list(pool)
    listed = ", ".join(map(repr, (*names, *pool.adapters)))
    if name is None:
        if len(names) == 1:
            return names[0]
        message = f"model is missing; this server has {listed}"
        raise ApiError(400, message, param="model", code="missing_required_parameter")
    if not isinstance(name, str):
        raise ApiError(400, f"model is {str(name)[:200]}; it should be a valid string", param="model")
    name = pool.adapters.get(name, name)
    if name not in pool:
        message = f"there is no model {name[:200]!r}; this server has {listed}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name
