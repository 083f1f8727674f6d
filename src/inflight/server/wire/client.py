"""`Client`: the client of a request. Decides when the request is given up: the client left, or it took too long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from starlette.types import Receive

from inflight.server.wire.api_errors import ApiError, ClientGoneError


class Client:
    """The client of one HTTP request, while the request is being served.

    Attributes:
        why_ended: why the client's work was ended early; None: it was not.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.why_ended: Literal["left", "stalled"] | None = None
        self._limit = limit

    @property
    def is_too_late(self) -> bool:
        """Whether the work was ended because its time was up."""
        return self.why_ended is None and self._limit.expired()

    def end(self, why: Literal["left", "stalled"]) -> None:
        """End the client's work now."""
        if self.why_ended is None and not self._limit.expired():
            self.why_ended = why
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def listen(self, receive: Receive) -> None:
        """Wait until the client disconnects. (Nothing else can arrive, since its request has been read.)"""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end("left")


@asynccontextmanager
async def attended(receive: Receive, timeout: float | None) -> AsyncIterator[Client]:
    """Run a block of work for a client, and cancel it as soon as the client no longer waits.

    Args:
        timeout: seconds that the work may take; None: no limit.

    Raises:
        ClientGoneError: the client has left, or does not read.
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
