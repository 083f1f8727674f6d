"""`EventStream`: an answer of server-sent events. Decides when it begins, what keeps it alive and how it ends.

It begins with the first event: what goes wrong before that is an ordinary error with a status of its own; what goes
wrong later is an event. Knows nothing of what the events say.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError, ClientGoneError
from inflight.server.wire.client import Client, attended

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Sends events to the client; waits while it does not read."""


class EventStream(Response):
    """The events that `work` writes.

    Args:
        work: given the client and how to write to it; one call is one write to the socket.
        error_event: writes out an error, as an event of the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[Client, Write], Awaitable[None]],
        settings: ServerSettings,
        error_event: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._settings = settings
        self._error_event = error_event or _data_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line, last_words = _Line(send, self), b""
        try:
            await self._run(line, receive)
        except ClientGoneError as error:
            if str(error) == "stalled":
                logger.warning("a client did not read for %g seconds: aborted", self._settings.max_stall)
            return
        except Exception as error:
            if not line.has_begun:
                raise
            told = ApiError.of(error)
            if told.code == "internal_error":
                logger.exception("a stream could not be finished")
            last_words = self._error_event(told)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.max_stall):
                await line.end(last_words)

    async def _run(self, line: "_Line", receive: Receive) -> None:
        async with attended(receive, self._settings.request_timeout) as client:
            pulse = _Pulse(line, client, self._settings)
            try:
                await self._work(client, line.write)
            finally:
                pulse.stop()


class _Line:
    """To the client.

    Attributes:
        has_begun: whether the status was sent.
        waits_since: when the write that is not through yet was begun (seconds of the loop's clock), if there is one.
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
        async with self._lock:  # what keeps it alive is written by another task
            self.waits_since = self._clock()
            if not self.has_begun:
                headers = self._response.raw_headers
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.last_write, self.waits_since = self.waits_since, None

    async def end(self, last_words: bytes) -> None:
        async with self._lock:
            await self._send({"type": "http.response.body", "body": last_words, "more_body": False})


class _Pulse:
    """Looks after a stream now and then: says a word where there was none, gives up a client that does not read."""

    def __init__(self, line: _Line, client: Client, settings: ServerSettings) -> None:
        self._line = line
        self._client = client
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._word: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(settings.keep_alive_interval, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
        if self._word is not None:
            self._word.cancel()

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
                self._word = self._loop.create_task(line.write(KEEP_ALIVE))
                due = now + self._settings.keep_alive_interval
        self._timer = self._loop.call_at(min(due, now + self._settings.keep_alive_interval), self._beat)


def _data_event(error: ApiError) -> bytes:
    return b"data: " + error.envelope() + b"\n\n"
