"""OpenAI's batch files: every line is a request to the API, answered by the server's own code, without a socket."""

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inflight.cli.prompts import PromptLine

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inflight.async_llm import AsyncLLM

MOST_IN_FLIGHT = 1000
"""Requests that are read and tokenized at once; the engine needs no more to fill its slots."""


async def answer(llm: "AsyncLLM", lines: Sequence[PromptLine], take: Callable[[int, dict[str, Any]], None]) -> None:
    """Send all lines' bodies to their endpoints, and call `take` with the number of each line and its line of OpenAI's
    output, in the order in which they end. Then the engine is stopped.

    A request that is refused is answered as a client of the server would be, with a status of 400 or more. Every name
    of a model in the file means the one that is loaded. Raises `ModelError`.
    """
    from inflight.server.app import create_app
    from inflight.server.serving.settings import ServerSettings

    names = [name for line in lines if isinstance(name := (line.body or {}).get("model"), str) and name]
    names = list(dict.fromkeys(names or ["inflight"]))
    app = create_app(llm, ServerSettings(model_name=names[0], model_aliases=tuple(names[1:])))
    waiting = iter(enumerate(lines))

    async def work() -> None:
        for number, line in waiting:
            take(number, await _answer_line(app, line))

    async with app.router.lifespan_context(app):
        await llm.start()
        await asyncio.gather(*(work() for _ in range(min(MOST_IN_FLIGHT, len(lines)))))


async def _answer_line(app: "FastAPI", line: PromptLine) -> dict[str, Any]:
    status, body = await _post(app, line.url or "", json.dumps(line.body).encode())
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": json.loads(body or "null")}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}


async def _post(app: "FastAPI", path: str, body: bytes) -> tuple[int, bytes]:
    """Call an ASGI application; return the answer's status and body. The client stays until it is answered."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])
    answered = asyncio.Event()
    status, pieces = 500, list[bytes]()

    async def receive() -> dict[str, Any]:
        for request in requests:
            return request
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                answered.set()

    with suppress(Exception):  # the application raises what it has answered with a status of 500, too
        await app(scope, receive, send)
    return status, b"".join(pieces)
