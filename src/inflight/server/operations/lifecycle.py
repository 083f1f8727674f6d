"""Graceful shutdown: the server refuses new requests, finishes running ones, and then exits with code 0.

While requests are still running, the server keeps listening: `/health` tells load balancers that it is draining, and
new clients learn when to retry.
"""

import asyncio
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.contracts.api.errors import EngineDeadError, ModelError
from inflight.server.endpoints import HEALTH_PATH, OPERATOR_PATHS
from inflight.server.operations.middleware import Middleware, refuse
from inflight.server.wire.api_errors import ApiError, path_of

SECONDS_TO_LEAVE = 2
"""Seconds that aborted requests, and then closed connections, may take to end."""

RETRY = {"Retry-After": "1"}
"""Seconds before clients should retry: by then another server may answer at the address."""

logger = logging.getLogger("inflight.server")


class Drain(Middleware):
    """Tracks running requests, and refuses new ones once the server drains.

    Args:
        grace_seconds: how long running requests may go on after draining has begun.
        abort_all: awaited when that time is up, so that requests end properly (a stream with a last event). Requests
            that still run `SECONDS_TO_LEAVE` later are cancelled; if their answer has not begun, it is a 503.

    Attributes:
        is_draining: whether new requests are refused.
    """

    def __init__(self, grace_seconds: float, abort_all: Callable[[], Awaitable[None]] | None = None) -> None:
        self.is_draining = False
        self._grace_seconds = grace_seconds
        self._abort_all = abort_all
        self._is_over = False
        self._inside: set[asyncio.Task[object]] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def begin(self) -> None:
        """Start to refuse new requests. May be called from a signal handler."""
        self.is_draining = True

    async def finish(self) -> None:
        """Return when no request is running any more, at the latest shortly after the grace period."""
        if await self._empty_within(self._grace_seconds):
            return
        logger.warning("%d requests still running after %g s: aborted", len(self._inside), self._grace_seconds)
        if self._abort_all is not None:
            try:
                async with asyncio.timeout(SECONDS_TO_LEAVE):
                    await self._abort_all()
                    await self._is_empty.wait()
            except Exception as error:  # the server must end in any case
                logger.warning("requests could not be aborted properly: %r", error)
        self.cut()
        await self._empty_within(SECONDS_TO_LEAVE)

    def cut(self) -> None:
        """Cancel the requests that are still running."""
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

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        path = path_of(scope)
        if path in OPERATOR_PATHS and not (self.is_draining and path == HEALTH_PATH):
            await app(scope, receive, send)
        elif not self.is_draining:
            await self._serve_inside(app, scope, receive, send)
        elif path == HEALTH_PATH:
            await JSONResponse({"status": "draining"}, 503, {"Connection": "close"})(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

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
                await self._refuse(scope, receive, send)
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._is_empty.set()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message, headers = "the server is shutting down; try again later", {"Connection": "close", **RETRY}
        error = ApiError(503, message, kind="overloaded_error", code="shutting_down", headers=headers)
        await refuse(scope, receive, send, error)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on SIGTERM or SIGINT and exits with code 0; a second SIGINT ends it at once.

    Args:
        drain: the `Drain` whose middleware surrounds the application.
        on_signals: what other signals do, in the event loop, by their names; those that this system lacks are left out.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, on_signals: Mapping[str, Callable[[], None]] | None = None
    ) -> None:
        super().__init__(config)
        if config.timeout_graceful_shutdown is None:
            config.timeout_graceful_shutdown = SECONDS_TO_LEAVE  # else a stalled client could block it forever
        self._drain = drain
        self._finishing: asyncio.Task[None] | None = None
        self._is_in_a_hurry = False
        known = {name: do for name, do in (on_signals or {}).items() if hasattr(signal, name)}
        self._on_signals = {int(getattr(signal, name)): do for name, do in known.items()}
        self._received: deque[int] = deque()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but does not raise the signal again at the end, which would set the exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in self._on_signals:
            before[signal.Signals(number)] = signal.signal(number, lambda sig, _: self._received.append(sig))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT."""
        self._is_in_a_hurry |= self._drain.is_draining and sig == signal.SIGINT
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns True when the server can end."""
        while self._received:
            self._on_signals[self._received.popleft()]()
        if self._drain.is_draining:
            if self._finishing is None:
                logger.info("no new requests are accepted; running ones may finish")
                self._finishing = asyncio.create_task(self._drain.finish())
            if self._is_in_a_hurry:
                self._drain.cut()
            self.should_exit |= self._is_in_a_hurry or self._finishing.done()
        return await super().on_tick(counter)


class Reloadable(Protocol):
    """A served model."""

    async def reload_weights(self) -> None:
        """See `AsyncLLM.reload_weights`."""


class ModelReload:
    """Reloads the model on a signal, without refusing requests. One reload at a time; a signal during one starts
    another afterwards."""

    def __init__(self, llm: Reloadable) -> None:
        self._llm = llm
        self._running: asyncio.Task[None] | None = None
        self._is_asked_again = False

    def begin(self) -> None:
        """Begin, in the event loop."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        else:
            self._is_asked_again = True

    async def _run(self) -> None:
        while True:
            self._is_asked_again = False
            logger.info("reloading the model; it will be served once loaded")
            start_time = time.monotonic()
            try:
                await self._llm.reload_weights()
                logger.info("the model was reloaded in %.1f s", time.monotonic() - start_time)
            except (ModelError, EngineDeadError) as error:
                logger.error("the model cannot be reloaded, so the old one stays: %s", error)
            if not self._is_asked_again:
                return
