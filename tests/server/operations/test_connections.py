"""A request's head must arrive within a time limit, and the number of connections is limited."""

import asyncio
import logging
import resource
import socket

import pytest
import uvicorn

from inflight.server.operations import connections
from inflight.server.operations.connections import RESERVE, allow_many_open_files
from tests.coroutines import run
from tests.server.operations.serving import SmallServer, connected, read_answer


def test_a_connection_without_a_complete_request_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SECONDS_FOR_HEAD", 0.2)
    good = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(SmallServer().app, http=connections.LimitedHeads, log_config=None)
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            for number, sent in enumerate((b"", good[:30], good + good[:30])):
                async with connected(url) as (reader, writer):
                    writer.write(sent)
                    if number == 2:
                        assert (await read_answer(reader))[0] == 200
                    assert await reader.read() == b""
            server.should_exit = True
            await task

    run(check())


def test_connections_beyond_the_limit_are_refused_and_the_others_notice_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections.LimitedHeads, "_last_warning", float("-inf"))

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(SmallServer().app, http=connections.limited_to(1), log_config=None)
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with connected(url) as (reader, writer):
                writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
                assert (await read_answer(reader))[0] == 200
                for _ in range(3):
                    async with connected(url) as (refused, _):
                        assert (await refused.read()).startswith(b"HTTP/1.1 503 ")
                writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
                assert (await read_answer(reader))[0] == 200
            server.should_exit = True
            await task

    with caplog.at_level(logging.WARNING, "inflight.server"):
        run(check())
    assert [record.getMessage() for record in caplog.records if record.name == "inflight.server"] == [
        "1 connections are open, as many as there may be: more are refused"
    ]


def test_the_limit_on_open_files_is_raised_and_leaves_a_reserve() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256) if soft >= 0 else 256, hard))
        room = allow_many_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert room == (None if hard == resource.RLIM_INFINITY else hard - RESERVE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
