"""A test server that speaks OpenAI's protocol and answers as the test says, with real sockets and no model."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

HEADERS = {"Content-Type": "text/event-stream"}


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """A text chunk of a completion."""
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chat_chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    """A text chunk of a chat."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage_chunk(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """The last chunk, if counts were requested."""
    return {"choices": [], "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}}


class Exchange:
    """A request that arrived, and the means to answer it."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self.body = body
        self.path = request.path
        self.headers = request.headers
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def peer(self) -> tuple[str, int]:
        """The client's end of the connection."""
        assert self._request.transport is not None
        address: tuple[str, int] = self._request.transport.get_extra_info("peername")
        return address

    async def send(self, *events: dict[str, Any] | str | bytes) -> None:
        """Stream events in one write; a string is the data of an event, and bytes are sent unchanged."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(b"".join(map(_event, events)))

    def break_off(self) -> None:
        """Close the connection in the middle of the answer."""
        assert self._request.transport is not None
        self._request.transport.abort()

    async def answer(self, text: str = " word") -> None:
        """Send the whole answer at once: a chunk for each token, then counts."""
        count, prompt = self.body["max_tokens"], self.body.get("prompt", "")
        is_chat = "messages" in self.body
        chunks = [chat_chunk(content=text) if is_chat else text_chunk(text)] * count
        end = chat_chunk("length") if is_chat else text_chunk("", "length")
        await self.send(*chunks, end, usage_chunk(len(prompt), count), "[DONE]")


Behaviour = Callable[[Exchange], Awaitable[web.Response | None]]


async def answer_at_once(exchange: Exchange) -> None:
    await exchange.answer()


class FakeServer:
    """A server on its own port.

    Attributes:
        behave: answers a request, either through the exchange or by returning a whole response.
        exchanges: all received requests, in order.
    """

    def __init__(self, behave: Behaviour = answer_at_once) -> None:
        self.behave = behave
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._arrived = asyncio.Condition()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [exchange.body for exchange in self.exchanges]

    async def exchange(self, number: int) -> Exchange:
        """The request with this number, as soon as it has arrived."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.exchanges) > number)
        return self.exchanges[number]

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[FakeServer]":
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._post)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @contextmanager
    def in_thread(self) -> "Iterator[FakeServer]":
        """The same for tests without an event loop."""
        started, ends = threading.Event(), list[Callable[[], object]]()

        async def serve() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            ends.append(lambda: loop.call_soon_threadsafe(stop.set))
            async with self.running():
                started.set()
                await stop.wait()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert started.wait(30)
            yield self
        finally:
            ends[0]()
            thread.join()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-1"}, {"id": "fake-2"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request, await request.json())
        async with self._arrived:
            self.exchanges.append(exchange)
            self._arrived.notify_all()
        return await self.behave(exchange) or exchange.response


def refuse(status: int, message: str) -> web.Response:
    """An error in OpenAI's format."""
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


def _event(event: dict[str, Any] | str | bytes) -> bytes:
    if isinstance(event, bytes):
        return event
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
