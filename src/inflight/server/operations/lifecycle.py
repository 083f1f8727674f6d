"""How the server ends in good order: it refuses what comes, finishes what runs, and then leaves with exit code 0.

Decides what happens between the first signal and the end. While requests are still inside, the server goes on
listening: so a load balancer hears from `/health` why it is sent away, and a new client is told when to come back.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.server.operations.refusals import HEALTH_PATH, OPERATOR_PATHS, path_of, refuse, start_answer

SECONDS_TO_LEAVE = 2
"""How long requests that were aborted, and then connections that were closed, have until they are cut."""

RETRY_AFTER = b"1"
"""Seconds after which a client is told to try again: there may be another server behind the address, or the next."""

logger = logging.getLogger("inflight.server")


class Drain:
    """Whether requests are still let in, and which are inside.

    Args:
        grace_seconds: how long those inside may go on when no more are let in.
        abort_all: awaited when that time is up, so that they can end in good order (a stream with a last event).
            Whatever is still inside `SECONDS_TO_LEAVE` later is cancelled: if its answer has not begun, it is a 503.

    Attributes:
        is_draining: whether no more are let in.
    """

    def __init__(self, grace_seconds: float, abort_all: Callable[[], Awaitable[None]] | None = None) -> None:
        self.is_draining = False
        self._grace_seconds = grace_seconds
        self._abort_all = abort_all
        self._is_over = False
        self._inside: set[asyncio.Task[object]] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """The application behind this door."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(app, scope, receive, send)

        return serve

    def begin(self) -> None:
        """Let no more in. May be called from a signal handler."""
        self.is_draining = True

    async def finish(self) -> None:
        """Return when nobody is inside any more: at the latest a little after the time of grace."""
        if await self._empty_within(self._grace_seconds):
            return
        logger.warning("still running after %g s, now aborted: %d", self._grace_seconds, len(self._inside))
        if self._abort_all is not None:
            try:
                async with asyncio.timeout(SECONDS_TO_LEAVE):
                    await self._abort_all()
                    await self._is_empty.wait()
            except Exception as error:  # whatever goes wrong, the server still has to end
                logger.warning("they could not be aborted in good order: %r", error)
        self.cut()
        await self._empty_within(SECONDS_TO_LEAVE)

    def cut(self) -> None:
        """Cancel whatever is still inside."""
        self._is_over = True
        for task in self._inside:
            task.cancel()

    async def _empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else None
        if path is None or (path in OPERATOR_PATHS and not (self.is_draining and path == HEALTH_PATH)):
            await app(scope, receive, send)
        elif not self.is_draining:
            await self._serve_inside(app, scope, receive, send)
        elif path == HEALTH_PATH:
            await start_answer(send, 503, body := b'{"status": "draining"}', [(b"connection", b"close")])
            await send({"type": "http.response.body", "body": body})
        else:
            await self._refuse(scope, send)

    async def _serve_inside(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        self._is_empty.clear()
        try:
            await app(scope, receive, send_watched)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            if not has_begun:
                await self._refuse(scope, send)
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._is_empty.set()

    async def _refuse(self, scope: Scope, send: Send) -> None:
        message = "the server is shutting down; try again later"
        headers = [(b"connection", b"close"), (b"retry-after", RETRY_AFTER)]
        await refuse(scope, send, 503, message, "overloaded_error", "shutting_down", headers)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that SIGTERM or SIGINT makes drain and end, with exit code 0; a second SIGINT cuts it short.

    Args:
        drain: the door that its application is behind.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        if config.timeout_graceful_shutdown is None:
            config.timeout_graceful_shutdown = SECONDS_TO_LEAVE  # else one who reads nothing could hold it for ever
        self._drain = drain
        self._finishing: asyncio.Task[None] | None = None
        self._is_in_a_hurry = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but without raising the signal again at the end, which would become the exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What the signals do."""
        self._is_in_a_hurry |= self._drain.is_draining and sig == signal.SIGINT
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Asked ten times a second; true when the server may end."""
        if self._drain.is_draining:
            if self._finishing is None:
                logger.info("no more requests are taken in; those that run may finish")
                self._finishing = asyncio.create_task(self._drain.finish())
            if self._is_in_a_hurry:
                self._drain.cut()
            self.should_exit |= self._is_in_a_hurry or self._finishing.done()
        return await super().on_tick(counter)
