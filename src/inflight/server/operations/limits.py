"""Limits on clients: body size, time to send it, and concurrent requests. Knows nothing of tokens.

Files (`STREAMED_PATHS`) are limited by their endpoint, which streams them to disk.

A body is received completely before the application sees it. So the limit applies to the received, not the announced
size, and slow or endless bodies are stopped here. (Starlette's limit on bytes answers in plain text and waits forever.)
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.server.endpoints import STREAMED_PATHS, is_work
from inflight.server.operations.middleware import Middleware, header_of, refusal, refuse
from inflight.server.wire.api_errors import ApiError, path_of

SECONDS_FOR_BODY = 30.0
"""Seconds that a client may take to send a request's body."""

SECONDS_TO_READ = 2.0
"""Seconds that a client whose body is too large may keep sending, so that it can read the answer before the close."""


class BodyLimit(Middleware):
    """Refuses bodies that are too large (413), too slow (408) or compressed (415).

    Args:
        max_bytes: most bytes of a body, however its size is announced.
        seconds: how long a body may take to arrive.
    """

    def __init__(self, max_bytes: int, seconds: float = SECONDS_FOR_BODY) -> None:
        self._max_bytes, self._seconds = max_bytes, seconds

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        coding = (header_of(scope, b"content-encoding") or b"identity").decode("latin-1")
        if coding.lower() != "identity":
            message = f"the request's Content-Encoding is {coding!r}; bodies are accepted as they are, without any"
            await refuse(scope, receive, send, ApiError(415, message, code="unsupported_content_encoding"))
            return
        if path_of(scope) in STREAMED_PATHS:
            await app(scope, receive, send)
            return
        announced = header_of(scope, b"content-length") or b""
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse_size(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._body(receive)
        except TimeoutError:
            message = f"the request's body did not arrive within {self._seconds:g} seconds"
            error = ApiError(408, message, code="request_timeout", headers={"Connection": "close"})
            await refuse(scope, receive, send, error)
            return
        if body is None:
            return  # the client disconnected
        if len(body) > self._max_bytes:
            await self._refuse_size(scope, receive, send)
            return
        is_given = False

        async def receive_whole() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()  # only the end of the connection can follow
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await app(scope, receive_whole, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, or the beginning of one that is too large; None if the client disconnected early."""
        body = bytearray()
        while len(body) <= self._max_bytes:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(body)

    async def _refuse_size(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once, but close only when the client has had time to read: if a connection is closed while the
        client still sends, the client loses the answer."""
        message = f"the request's body is larger than {self._max_bytes} bytes, the most that this server accepts"
        kind, close = "request_too_large", {"Connection": "close"}
        answer = refusal(scope, ApiError(413, message, kind=kind, code=kind, headers=close))
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        if (header_of(scope, b"expect") or b"").lower() != b"100-continue":  # otherwise nothing is on its way
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS_TO_READ):
                    while (await receive()).get("more_body", False):
                        pass
        await send({"type": "http.response.body", "body": b""})


class ConcurrencyLimit(Middleware):
    """Refuses requests (429, with `Retry-After`) while `max_requests` are being served. Operators' paths and the live
    page's do not count.

    Args:
        max_requests: most requests served at once; each counts until the last byte of its answer.
        retry_after: seconds after which a client should retry.
    """

    def __init__(self, max_requests: int, retry_after: int = 1) -> None:
        self._max_requests, self._retry_after = max_requests, retry_after
        self._num_inside = 0

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        if not is_work(path_of(scope)):
            await app(scope, receive, send)
            return
        if self._num_inside >= self._max_requests:
            message = (
                f"{self._num_inside} requests are being served, and at most {self._max_requests} may be; try later"
            )
            wait = {"Retry-After": str(self._retry_after)}
            error = ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=wait)
            await refuse(scope, receive, send, error)
            return
        self._num_inside += 1
        try:
            await app(scope, receive, send)
        finally:
            self._num_inside -= 1
