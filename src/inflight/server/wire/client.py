"""Who waits for an answer: decides when it is given up because nobody does, or because it took too long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from starlette.types import Receive

from inflight.server.wire.api_errors import ApiError, ClientGoneError


class Client:
    """The client of one HTTP request, as long as it is waited for.

    Attributes:
        why_ended: why the work for it was ended early, if it was.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.why_ended: Literal["left", "stalled"] | None = None
        self._limit = limit

    @property
    def is_too_late(self) -> bool:
        """Whether the work is ended because its time is up."""
        return self.why_ended is None and self._limit.expired()

    def end(self, why: Literal["left", "stalled"]) -> None:
        """End the work for it, now."""
        if self.why_ended is None and not self._limit.expired():
            self.why_ended = why
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def listen(self, receive: Receive) -> None:
        """Until it leaves. (Nothing else is to come: its request was read.)"""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end("left")


@asynccontextmanager
async def attended(receive: Receive, timeout: float | None) -> AsyncIterator[Client]:
    """A block of work for a client, which is cancelled as soon as nobody waits for it any more.

    Args:
        timeout: seconds that it may take; None: no limit.

    Raises:
        ClientGoneError: the client has left, or does not read.
        ApiError: it took too long (504).
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
