"""Limits of connections, and of the size and time of a request's head.

Each connection is an open file: those beyond the limit are closed at once, to keep a reserve of file descriptors.
Middleware cannot limit a head, which applications see only once complete, and before any API key is checked.
"""

import asyncio
import logging
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Bytes that may arrive without anything that can be passed on: a head, or the trailers of a chunked body."""

SECONDS_FOR_HEAD = 30.0
"""Seconds that a connection may take to send the head of a request."""

_TOO_LARGE = b"the request's head is larger than %d bytes" % MAX_HEAD_BYTES
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
SECONDS_BETWEEN_WARNINGS = 60.0

RESERVE = 64
"""File descriptors reserved for other uses: pipes to the engine, sockets of exporters, modules."""

logger = logging.getLogger("inflight.server")


class LimitedHeads(HttpToolsProtocol):
    """uvicorn's protocol with these limits. A head that is too large gets a 431; one that is late, a close.

    Attributes:
        max_connections: most connections that are open at once; further ones get a 503 and are closed. None: any
            number.
    """

    max_connections: ClassVar[int | None] = None
    _last_warning: ClassVar[float] = float("-inf")

    _num_unused = 0  # bytes received since something was last passed on
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; starts the timer. Closes a connection that is one too many."""
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self._warn()
            transport.write(_FULL)
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, up to the limit."""
        self._num_unused += len(data)
        super().data_received(data)
        if self._num_unused > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def on_message_begin(self) -> None:
        """As uvicorn's."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> Any:
        """As uvicorn's."""
        self._num_unused = 0
        self._stop_waiting()
        return super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """As uvicorn's."""
        self._num_unused = 0
        super().on_message_complete()

    def _warn(self) -> None:
        now = self.loop.time()
        if now >= LimitedHeads._last_warning + SECONDS_BETWEEN_WARNINGS:
            LimitedHeads._last_warning = now
            logger.warning("%d connections are open, as many as there may be: more are refused", self.max_connections)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(SECONDS_FOR_HEAD, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited_to(max_connections: int | None) -> type[LimitedHeads]:
    """Return the protocol for a server with at most this many connections; None: any number."""
    return type("LimitedConnections", (LimitedHeads,), {"max_connections": max_connections})


def allow_many_open_files() -> int | None:
    """Raise this process's own limit to the system's, and return the number of connections that it allows; None: any
    number."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return None if soft == resource.RLIM_INFINITY else max(1, soft - RESERVE)
