"""Applications behind a real socket, and clients for tests."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve the application, and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # listens already, so no client has to wait for the server
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose paths are relative to the application."""
    async with serving(app) as url, aiohttp.ClientSession(url) as client:
        yield client


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of an answer with a content length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


class SmallServer:
    """An application whose answers describe the request, and whose streams wait for the test's permission.

    Attributes:
        num_calls: requests that reached the endpoint.
        num_left: streams that were closed before they were complete.
        gate: lets streams continue.
    """

    def __init__(self) -> None:
        self.num_calls = self.num_left = 0
        self.gate = asyncio.Event()
        routes = [Route(path, self.small) for path in ("/health", "/metrics", "/version", "/v1/models")]
        routes.append(Route("/v1/responses/{name}", self.small))
        routes += [Route(path, self.complete, methods=["POST"]) for path in (COMPLETIONS, "/v1/messages")]
        self.app = Starlette(routes=[*routes, Route("/broken", self.broken), Route("/gone", self.never)])

    async def small(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def complete(self, request: Request) -> Response:
        self.num_calls += 1
        body = await request.body()
        if body.startswith(b"{") and json.loads(body).get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        return PlainTextResponse(str(len(body)))

    async def broken(self, request: Request) -> Response:
        raise KeyError("lost")

    async def never(self, request: Request) -> Response:
        self.num_calls += 1
        while not await request.is_disconnected():
            await asyncio.sleep(0)
        self.num_left += 1
        return Response()

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await self.gate.wait()
            yield b"last"
        except BaseException:
            self.num_left += 1
            raise
