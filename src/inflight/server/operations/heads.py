"""How much is taken from a connection before there is a request: bytes of a head, seconds until it is there.

What a middleware cannot limit, because no application sees it; and nobody has had to show a key yet.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""That may come without anything that can be handed on: a head, or what follows a body in chunks."""

SECONDS_FOR_HEAD = 30.0
"""How long a connection may take to send the head of a request."""

_TOO_LARGE = b"the request's head is larger than %d bytes" % MAX_HEAD_BYTES
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class LimitedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which would read heads for ever. Too large ones are a 431, those that do not come are cut."""

    _num_unused = 0  # bytes that have come since there was last something to hand on
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; the time begins."""
        super().connection_made(transport)
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

    def _await_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(SECONDS_FOR_HEAD, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
