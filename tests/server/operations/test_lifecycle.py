"""How a server shuts down: a real process, real signals, and clients with requests in progress."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.coroutines import run
from tests.server.operations.serving import connected

HEALTHY = (200, {"status": "ok"})
DRAINING = (503, {"status": "draining"})


@dataclass
class Served:
    """A server process and a client of it."""

    process: asyncio.subprocess.Process
    url: str
    client: aiohttp.ClientSession

    async def line(self) -> str:
        """The next line that the server prints."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    def let_go_on(self) -> None:
        """Send the server the signal to continue."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def health(self) -> tuple[int, object]:
        async with self.client.get("/health") as answer:
            return answer.status, await answer.json()

    async def end(self, number: signal.Signals) -> None:
        """Send a signal, and return once the server has received it."""
        self.process.send_signal(number)
        while await self.health() != DRAINING:
            pass

    async def exit_code(self) -> int:
        """The exit code of the server, after it has reported an orderly shutdown."""
        assert await self.line() == "all done"
        return await self.process.wait()


@asynccontextmanager
async def served(grace_seconds: float, *how: str) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.server.operations.drained_server", str(grace_seconds), *how),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(await process.stdout.readline())}"
        async with aiohttp.ClientSession(url) as client:
            server = Served(process, url, client)
            assert await server.health() == HEALTHY
            yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_new_ones_are_refused_and_the_exit_code_is_0(number: signal.Signals) -> None:
    async def check() -> None:
        async with served(60) as server, server.client.get("/v1/stream") as stream:
            assert await stream.content.readuntil(b"\n\n") == b"data: first\n\n"
            await server.end(number)
            async with server.client.get("/v1/models") as refused:
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                assert refused.headers["connection"] == "close"
                error = (await refused.json())["error"]
                assert error["code"] == "shutting_down"
                assert "shutting down" in error["message"]
            for path in ("/metrics", "/version"):
                async with server.client.get(path) as answer:
                    assert answer.status == 200
            server.process.send_signal(signal.SIGTERM)  # an impatient supervisor changes nothing
            assert await server.health() == DRAINING
            server.let_go_on()
            assert await stream.read() == b"data: last\n\n"
            assert await server.exit_code() == 0
            with pytest.raises(aiohttp.ClientConnectionError):
                await server.health()

    run(check())


def test_an_idle_server_ends_at_once_even_with_open_connections() -> None:
    async def check() -> None:
        async with served(60) as server, connected(server.url), connected(server.url) as (_, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHo")  # half a request
            server.process.send_signal(signal.SIGTERM)
            assert await server.exit_code() == 0

    run(check())


def test_requests_that_exceed_the_grace_period_are_aborted_cleanly() -> None:
    async def check() -> None:
        async with served(0.2, "abort") as server, server.client.get("/v1/stream") as stream:
            server.process.send_signal(signal.SIGTERM)
            assert await stream.read() == b"data: first\n\ndata: aborted\n\n"
            assert await server.exit_code() == 0

    run(check())


@pytest.mark.parametrize("how", [(), ("broken",)])
def test_connections_of_requests_that_cannot_be_aborted_are_closed(how: tuple[str, ...]) -> None:
    async def check() -> None:
        async with served(0.2, *how) as server, server.client.get("/v1/stream") as stream:
            waiting = asyncio.create_task(server.client.get("/v1/wait").__aenter__())
            assert await server.line() == "waiting"
            async with server.client.get("/v1/flood") as flood:
                await flood.content.readexactly(1)  # and no event after it
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await stream.read()
                refused = await waiting
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "shutting_down"
                assert await server.exit_code() == 0

    run(check())


def test_a_second_interrupt_ends_the_server_at_once() -> None:
    async def check() -> None:
        async with served(1000) as server, server.client.get("/v1/stream") as stream:
            await server.end(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            assert await server.exit_code() == 0

    run(check())
