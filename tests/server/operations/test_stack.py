"""All of it together: that each layer sees what it must, and that those who are turned away are seen, too."""

import asyncio
import json
import logging
from collections.abc import Iterator
from io import StringIO
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from starlette.types import ASGIApp

from inflight.record import EngineStats
from inflight.server.operations.access_log import AccessLog
from inflight.server.operations.api_keys import ApiKeys
from inflight.server.operations.lifecycle import Drain
from inflight.server.operations.logs import JsonLines
from inflight.server.operations.metrics import Metrics
from inflight.server.operations.stack import Operations
from inflight.server.operations.tracing import Tracing
from tests.server.operations.serving import COMPLETIONS, SmallServer, client_of, connected, run, serving

KEY = {"Authorization": "Bearer right"}
PAGE = {"Origin": "https://page.example"}


async def no_stats() -> EngineStats:
    raise RuntimeError


def operations(**options: Any) -> Operations:
    """With a key, room for one request, and bodies of up to 100 bytes."""
    return Operations(
        drain=Drain(30.0),
        access_log=AccessLog(),
        metrics=Metrics("tiny", no_stats),
        max_body_bytes=100,
        max_requests=1,
        api_keys=ApiKeys(["right"]),
        tracing=Tracing("tiny", TracerProvider()),
        **options,
    )


@pytest.fixture
def log() -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("inflight.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_whoever_is_turned_away_is_named_logged_and_counted(log: StringIO) -> None:
    async def check() -> None:
        around, server = operations(), SmallServer()
        names = []

        async def ask(client: aiohttp.ClientSession, status: int, data: bytes = b"", **headers: str) -> None:
            async with client.post(COMPLETIONS, data=data, headers=headers) as answer:
                assert answer.status == status
                names.append(answer.headers["x-request-id"])
                if status != 200:
                    assert (await answer.json())["error"]["message"]

        async with client_of(around.surround(server.app)) as client:
            await ask(client, 200, **KEY)
            await ask(client, 401)
            await ask(client, 413, b"x" * 101, **KEY)
            async with client.post(COMPLETIONS, json={"stream": True}, headers=KEY) as stream:
                await stream.content.readexactly(5)
                await ask(client, 429, **KEY)
                await ask(client, 401)  # a stranger does not hear how busy it is
                around.drain.begin()
                await ask(client, 503, **KEY)
                async with client.get("/health") as answer:
                    assert (answer.status, await answer.json()) == (503, {"status": "draining"})
                server.gate.set()
                assert await stream.read() == b"last"
            lines = [json.loads(line) for line in log.getvalue().splitlines()]
            assert [line["status"] for line in lines] == [200, 401, 413, 429, 401, 503, 503, 200]
            assert [line["request_id"] for line in lines if line["path"] == COMPLETIONS][:-1] == names
            text = (await around.metrics.scrape()).decode()
            for status, path, num in ((401, "other", 2), (503, "other", 1), (413, "other", 1), (200, COMPLETIONS, 2)):
                assert f'path="{path}",status="{status}"}} {num}.0' in text
        assert server.num_calls == 2

    run(check())


def test_who_leaves_before_the_answer_has_a_line(log: StringIO) -> None:
    async def check() -> None:
        async with serving(operations().surround(SmallServer().app)) as url:
            async with connected(url) as (_, writer):
                head = (
                    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nx-api-key: right\r\nContent-Length: 50\r\n\r\nhalf"
                )
                writer.write(head.encode())
                await writer.drain()
            while not log.getvalue():
                await asyncio.sleep(0)
        (line,) = log.getvalue().splitlines()
        assert json.loads(line)["status"] == 499

    run(check())


def test_pages_of_other_origins_are_let_in_only_if_that_was_said() -> None:
    asks = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def answers(app: ASGIApp) -> list[tuple[int, str | None]]:
        async with client_of(app) as client:
            found = []
            for method, headers in (("OPTIONS", asks), ("POST", KEY | PAGE), ("POST", PAGE)):
                async with client.request(method, COMPLETIONS, headers=headers) as answer:
                    found.append((answer.status, answer.headers.get("access-control-allow-origin")))
            return found

    async def check() -> None:
        page = PAGE["Origin"]
        assert await answers(operations().surround(SmallServer().app)) == [(401, None), (200, None), (401, None)]
        around = operations(allowed_origins=[page])
        assert await answers(around.surround(SmallServer().app)) == [(200, page), (200, page), (401, page)]
        around = operations(allowed_origins=["https://other.example"])
        assert [origin for _, origin in await answers(around.surround(SmallServer().app))] == [None] * 3

    run(check())


def test_observers_are_all_who_count() -> None:
    around = operations()
    assert around.observers == [around.access_log, around.metrics, around.tracing]


def test_a_hundred_streams_at_once_are_all_there_to_their_end() -> None:
    async def check() -> None:
        server = SmallServer()
        around = Operations(
            drain=Drain(30.0), access_log=AccessLog(), metrics=Metrics("tiny", no_stats), max_body_bytes=100
        )
        async with client_of(around.surround(server.app)) as client:

            async def follow() -> bytes:
                async with client.post(COMPLETIONS, json={"stream": True}) as answer:
                    return await answer.read()

            tasks = [asyncio.create_task(follow()) for _ in range(100)]
            while server.num_calls < 100:
                await asyncio.sleep(0)
            assert len(around.drain._inside) == 100
            server.gate.set()
            assert await asyncio.gather(*tasks) == [b"firstlast"] * 100
        assert not around.drain._inside

    run(check())
