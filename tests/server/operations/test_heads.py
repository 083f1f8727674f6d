"""The head of a request has to arrive within a time limit."""

import asyncio
import socket

import pytest
import uvicorn

from inflight.server.operations import heads
from tests.coroutines import run
from tests.server.operations.serving import SmallServer, connected, read_answer


def test_a_connection_without_a_complete_request_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SECONDS_FOR_HEAD", 0.2)
    good = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(SmallServer().app, http=heads.LimitedHeads, log_config=None)
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
