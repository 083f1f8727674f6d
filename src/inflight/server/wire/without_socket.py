"""`answered`: what an application answers, message by message, without a socket."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message


async def answered(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
    """Answer a request by an application: yield the messages of its answer, together those that are there together.

    The client stays until it is answered. Closing this, or cancelling whoever reads it, cancels the application.

    Args:
        scope: what ASGI says of the request, as far as it is plain data.

    Raises:
        Exception: what the application raises.
    """
    messages: list[Message] = []
    news = asyncio.Event()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    nothing_more: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        for request in requests:
            return request
        return await nothing_more

    async def send(message: Message) -> None:
        messages.append(message)
        news.set()

    async def run() -> None:
        await app(scope | {"asgi": {"version": "3.0"}, "client": None, "server": None}, receive, send)

    answering = asyncio.create_task(run())
    answering.add_done_callback(lambda _: news.set())
    try:
        while not answering.done() or messages:
            await news.wait()
            news.clear()
            if messages:
                together, messages = messages, []
                yield together
        answering.result()
    finally:
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
            if not answering.cancelled():
                answering.exception()  # nobody waits for the answer any more, nor for why there is none
