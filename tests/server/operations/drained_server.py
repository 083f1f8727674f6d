"""A server for shutdown tests: run as a program, with the seconds of grace. Each line on standard input is a signal.

It prints its port. `/v1/stream` sends a first event, and a last one after the next signal; `/v1/wait` answers after the
next signal; `/v1/flood` never stops. With "abort" as second argument, streams can be aborted; with "broken", aborting
fails.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from inflight.server.operations.lifecycle import Drain, DrainingServer

leave, aborted = asyncio.Event(), asyncio.Event()


async def answer(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def stream(request: Request) -> Response:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: first\n\n"
        waits = [asyncio.create_task(event.wait()) for event in (leave, aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        yield b"data: aborted\n\n" if aborted.is_set() else b"data: last\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def wait(request: Request) -> Response:
    print("waiting", flush=True)
    await leave.wait()
    return PlainTextResponse("done")


async def flood(request: Request) -> Response:
    async def water() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1_000_000

    return StreamingResponse(water())


async def abort_all() -> None:
    if sys.argv[2] == "broken":
        raise KeyError("lost")
    aborted.set()


async def main() -> None:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: sys.stdin.readline() and leave.set())
    routes = [Route(path, answer) for path in ("/health", "/metrics", "/version", "/v1/models")]
    routes += [Route("/v1/stream", stream), Route("/v1/wait", wait), Route("/v1/flood", flood)]
    drain = Drain(float(sys.argv[1]), abort_all if len(sys.argv) > 2 else None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = drain.middleware(Starlette(routes=routes))
        await DrainingServer(uvicorn.Config(app, log_config=None), drain).serve(sockets=[listener])
    print("all done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
