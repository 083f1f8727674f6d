"""Delivers answers: clients that may disconnect, and streams of server-sent events.

A stream begins with its first event: an error before that is an ordinary answer with its own status; a later error
becomes an event. Independent of events' content.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError, ClientGoneError, errors_of

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Sends events to the client, and waits while the client does not read."""


class Client:
    """The client of one HTTP request, while the request is being served.

    Attributes:
        why_ended: why the client's work was cancelled; None: it was not.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.why_ended: Literal["left", "stalled"] | None = None
        self._limit = limit

    @property
    def is_too_late(self) -> bool:
        """Whether the work timed out."""
        return self.why_ended is None and self._limit.expired()

    def end(self, why: Literal["left", "stalled"]) -> None:
        """Cancel the client's work."""
        if self.why_ended is None and not self._limit.expired():
            self.why_ended = why
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def listen(self, receive: Receive) -> None:
        """Wait until the client disconnects. (Nothing else can arrive: its request has been read.)"""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end("left")


@asynccontextmanager
async def attended(receive: Receive, timeout: float | None) -> AsyncIterator[Client]:
    """Run a block of work for a client, cancelled when the client disconnects.

    Args:
        timeout: seconds that the work may take; None: no limit.

    Raises:
        ClientGoneError: the client has disconnected, or does not read.
        ApiError: the work took too long (504).
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            client = Client(limit)
            listener = asyncio.create_task(client.listen(receive))
            try:
                yield client
            finally:
                listener.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if client.why_ended is not None:
            raise ClientGoneError(client.why_ended) from None
        raise ApiError(504, f"the request took longer than {timeout:g} seconds", code="timeout") from None


class EventStream(Response):
    """A streaming response with the events that `work` writes.

    Args:
        work: called with the client and a write function; each call of that is one write to the socket.
        error_event: encodes an error as the last event; None: as in the endpoint's envelope.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[Client, Write], Awaitable[None]],
        settings: ServerSettings,
        error_event: Callable[[ApiError], bytes | None] = lambda _: None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._settings = settings
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line, last_event = _Line(send, self), b""
        try:
            await self._run(line, receive)
        except ClientGoneError as error:
            if str(error) == "stalled":
                logger.warning("a client did not read for %g seconds: aborted", self._settings.max_stall)
            return
        except Exception as error:
            if not line.has_begun:
                raise
            api_error = ApiError.from_exception(error)
            if api_error.code == "internal_error":
                logger.exception("a stream could not be finished")
            last_event = self._error_event(api_error) or _event_of(api_error, scope)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.max_stall):
                await line.end(last_event)

    async def _run(self, line: "_Line", receive: Receive) -> None:
        async with attended(receive, self._settings.request_timeout) as client:
            pulse = _KeepAlive(line, client, self._settings)
            try:
                await self._work(client, line.write)
            finally:
                pulse.stop()


class _Line:
    """Writes the response to the client.

    Attributes:
        has_begun: whether the status was sent.
        waits_since: when the write in progress began, in seconds of the loop's clock; None: no write is in progress.
        last_write: when something was last sent.
    """

    def __init__(self, send: Send, response: Response) -> None:
        self.has_begun = False
        self.waits_since: float | None = None
        self._clock = asyncio.get_running_loop().time
        self.last_write = self._clock()
        self._send = send
        self._response = response
        self._lock = asyncio.Lock()

    async def write(self, events: bytes) -> None:
        async with self._lock:  # keep-alive comments are written by another task
            self.waits_since = self._clock()
            if not self.has_begun:
                headers = self._response.raw_headers
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.last_write, self.waits_since = self.waits_since, None

    async def end(self, last_event: bytes) -> None:
        async with self._lock:
            await self._send({"type": "http.response.body", "body": last_event, "more_body": False})


class _KeepAlive:
    """Periodically checks a stream: keeps a silent one alive, and drops a client that does not read."""

    def __init__(self, line: _Line, client: Client, settings: ServerSettings) -> None:
        self._line = line
        self._client = client
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._keep_alive: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(settings.keep_alive_interval, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
        if self._keep_alive is not None:
            self._keep_alive.cancel()

    def _beat(self) -> None:
        line, now = self._line, self._loop.time()
        if line.waits_since is not None:
            due = line.waits_since + self._settings.max_stall
            if due <= now:
                self._client.end("stalled")
                return
        else:
            due = line.last_write + self._settings.keep_alive_interval
            if due <= now:
                self._keep_alive = self._loop.create_task(line.write(KEEP_ALIVE))
                due = now + self._settings.keep_alive_interval
        self._timer = self._loop.call_at(min(due, now + self._settings.keep_alive_interval), self._beat)


def _event_of(error: ApiError, scope: Scope) -> bytes:
    errors = errors_of(scope)
    return errors.event(errors.body(error, scope))
