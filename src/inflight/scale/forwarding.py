"""HTTP requests that one deployment of Ray Serve hands to another: as plain data, and answered message by message.

Decides what a router of Serve can read of a request: `prompt`, the text that its prompt begins with.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

from inflight.batches.request_lines import prompt_of

HANDED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request whose body has arrived.

    Attributes:
        scope: what ASGI says of it, as far as it is plain data.
        prompt: what Serve's prefix-affinity router compares. It cannot be empty: requests without a prompt have their
            path there.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str

    @classmethod
    async def receive(cls, scope: Scope, receive: Receive) -> "ForwardedRequest | None":
        """The request; None if its client left before it had sent all."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                plain = {name: scope[name] for name in HANDED_ON if name in scope}
                return cls(plain, bytes(body), prompt_of(bytes(body)).decode(errors="replace") or scope["path"])
        return None


async def answered(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Answer a request by an application: yield the messages of its answer, together those that are there together.

    Closing this tells the application that the client has left.
    """
    messages: list[Message] = []
    news, has_left = asyncio.Event(), asyncio.Event()
    body = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> Message:
        for message in body:
            return message
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)
        news.set()

    scope = request.scope | {"asgi": {"version": "3.0"}, "client": None, "server": None, "extensions": {}}

    async def run() -> None:
        await app(scope, receive, send)

    answering = asyncio.create_task(run())
    answering.add_done_callback(lambda _: news.set())
    try:
        while not (answering.done() and not messages):
            await news.wait()
            news.clear()
            if messages:
                together, messages = messages, []
                yield together
        answering.result()
    finally:
        has_left.set()
        if not answering.done():
            with suppress(Exception):
                await answering
