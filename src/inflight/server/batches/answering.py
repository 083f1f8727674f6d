"""`AppAnswerer` and `answered`: answer requests by an ASGI application, without a socket.

A line of a batch file is answered or refused exactly like a client's request.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import ASGIApp, Message

from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError
from inflight.entrypoints.async_llm import AsyncLLM

SECONDS_BEFORE_RETRY = 0.5


class AppAnswerer:
    """Answers by an application; see `batches.worker.Answerer`.

    Args:
        llm: the application's model.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM) -> None:
        self._app, self._llm = app, llm

    async def wait_until_ready(self) -> None:
        """Return once the engine runs. Raises `EngineGivenUpError`, `ModelError`."""
        while True:
            try:
                await self._llm.start()
            except EngineGivenUpError:
                raise
            except EngineDeadError:  # it will be restarted
                await asyncio.sleep(SECONDS_BEFORE_RETRY)
            else:
                return

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """POST a body to a path; return the answer's status and body. The client never disconnects."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        }
        status, pieces = 500, list[bytes]()
        with suppress(Exception):  # the application also raises errors that it answered with status 500
            async with aclosing(answered(self._app, scope, body)) as answer:
                async for messages in answer:
                    for message in messages:
                        if message["type"] == "http.response.start":
                            status = message["status"]
                        else:
                            pieces.append(message.get("body", b""))
        return status, b"".join(pieces)


async def answered(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
    """Run an application for a request: yield the messages of its answer, in batches. The client never disconnects.
    Closing this, or cancelling its reader, cancels the application.

    Args:
        scope: the request's ASGI scope, plain data only.

    Raises:
        Exception: the application's.
    """
    messages: list[Message] = []
    changed = asyncio.Event()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    nothing_more: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        for request in requests:
            return request
        return await nothing_more

    async def send(message: Message) -> None:
        messages.append(message)
        changed.set()

    async def run() -> None:
        await app(scope | {"asgi": {"version": "3.0"}, "client": None, "server": None}, receive, send)

    answering = asyncio.create_task(run())
    answering.add_done_callback(lambda _: changed.set())
    try:
        while not answering.done() or messages:
            await changed.wait()
            changed.clear()
            if messages:
                together, messages = messages, []
                yield together
        answering.result()
    finally:
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
            if not answering.cancelled():
                answering.exception()  # mark the exception as retrieved
