"""Clients that leave, wait, or do not read; streams that fail. After each, nothing runs and no block is held."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from inflight import AsyncLLM
from inflight.server.serving.settings import ServerSettings
from tests.server.serving import TEMPLATE, RunningServer, raw_request, read_until, send
from tests.stepper import Stepper

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_OF_ONE = [{"role": "user", "content": "a"}]
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 2}, b"data: "),
        (CHAT, {"messages": CHAT_OF_ONE, "n": 2}, b"data: "),
        ("/v1/messages", {"messages": CHAT_OF_ONE, "max_tokens": 100}, b"event: message_start"),
        ("/v1/responses", {"input": "a"}, b"event: response.created"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.thorough("False")
def test_a_client_that_leaves_aborts_its_request(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], first: bytes, is_stream: bool
) -> None:
    steps = Stepper(monkeypatch)
    steps.llm.tokenizer.inner.chat_template = TEMPLATE  # type: ignore[union-attr]
    with RunningServer(steps.llm) as server:
        asyncio.run(steps.llm.start())
        with server.connection() as connection:
            send(connection, path, **body, stream=is_stream)
            steps.allow(2)
            if is_stream:
                read_until(connection, first)
            else:
                server.observer.wait_for_tokens()
        assert server.observer.has_ended.wait(60)
        assert server.observer.take_reasons() == ["abort"]
        steps.allow()
        server.check_idle()


def test_clients_that_leave_at_random_points(server: RunningServer) -> None:
    """Clients leave during their request, before the first token, or later, with a close or a reset."""
    chance = random.Random(0)

    async def visit(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        is_stream = number % 3 > 0
        request = raw_request(COMPLETIONS, json.dumps({**LONG, "stream": is_stream, "max_tokens": 60}).encode())
        if number % 10 == 0:
            request = request[: chance.randrange(1, len(request))]
        writer.write(request)
        await writer.drain()
        if is_stream and number % 10:
            for _ in range(chance.randrange(20)):
                if (await reader.readuntil(b"\n\n")).endswith(b"data: [DONE]\n\n"):
                    break  # few events report many tokens if the client read late
        if number % 2:
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.close()

    async def check() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(visit(number) for number in range(200)))

    asyncio.run(check())
    server.check_idle()
    assert {"abort"} <= set(server.observer.take_reasons()) <= {"abort", "length"}
    assert server.complete(prompt="a", max_tokens=1)


def change(monkeypatch: pytest.MonkeyPatch, server: RunningServer, **settings: Any) -> None:
    """Change a setting for the rest of the test."""
    service = server.app.state.service
    monkeypatch.setattr(service, "settings", replace(service.settings, **settings))


def test_a_request_that_exceeds_its_time_limit_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    with RunningServer(steps.llm, request_timeout=0.5) as server:
        asyncio.run(steps.llm.start())
        response = server.http.post(COMPLETIONS, json={**LONG, "max_tokens": 20})
        assert response.status_code == 504
        assert response.json()["error"]["message"] == "the request took longer than 0.5 seconds"
        assert server.observer.take_reasons() == ["timeout"]
        change(monkeypatch, server, request_timeout=5.0)  # its first token has to arrive in time
        with server.connection() as connection:
            steps.allow(2)
            send(connection, COMPLETIONS, **{**LONG, "max_tokens": 20}, stream=True, return_token_ids=True)
            answer = read_until(connection, b"\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        *_, last, _ = answer.split(b"data: ")[-1].split(b"\n\n")[0], b""
        assert json.loads(last)["error"]["code"] == "timeout"
        assert b"[DONE]" not in answer
        assert server.observer.take_reasons() == ["timeout"]
        steps.allow()
        server.check_idle()


def test_a_stream_that_waits_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    with RunningServer(steps.llm, keep_alive_interval=0.05) as server, server.connection() as connection:
        send(connection, COMPLETIONS, **{**LONG, "max_tokens": 2}, stream=True)
        answer = b""
        while answer.count(b": keep-alive\n\n") < 3:
            piece = connection.recv(65536)
            assert piece
            answer += piece
        assert b"data: " not in answer
        steps.allow()
        answer = read_until(connection, b"data: [DONE]")
        assert b'"finish_reason":"length"' in answer
        server.check_idle()


def test_a_failure_before_the_first_token_sets_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    with RunningServer(steps.llm) as server:
        asyncio.run(steps.llm.start())
        steps.error = RuntimeError("the device is on fire")
        steps.allow()
        for is_stream in (False, True):
            response = server.http.post(COMPLETIONS, json={**LONG, "max_tokens": 2, "stream": is_stream})
            assert response.status_code == 500
            error = response.json()["error"]
            assert "the device is on fire" in error["message"]
            assert (error["type"], error["code"]) == ("server_error", "generation_failed")
        assert server.observer.take_reasons() == ["error", "error"]
        steps.error = None
        server.check_idle()


def test_a_full_queue_says_when_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch, max_num_seqs=1, max_num_waiting=1)
    with RunningServer(steps.llm) as server, ThreadPoolExecutor(2) as others:
        asyncio.run(steps.llm.start())

        def ask(is_stream: bool) -> httpx2.Response:
            return server.http.post(COMPLETIONS, json={**LONG, "prompt": [[5], [6]], "stream": is_stream})

        with server.connection() as first, server.connection() as second:
            steps.allow(1)
            send(first, COMPLETIONS, **LONG, stream=True, return_token_ids=True)
            read_until(first, b"data: ")
            steps.wait_until_held()
            send(second, COMPLETIONS, **LONG, stream=True)
            server.wait_for_calls(2)
            responses = [others.submit(ask, is_stream) for is_stream in (False, True)]
            server.wait_for_calls(2 + 2 * 2)
            steps.allow(1)
            for response in (each.result(60) for each in responses):
                assert response.status_code == 429
                assert response.headers["retry-after"] == "1"
                assert response.json()["error"]["code"] == "queue_full"
            assert set(server.observer.take_reasons()) <= {"refused", "abort"}
        steps.allow()
        server.check_idle()


def test_a_later_failure_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    with RunningServer(steps.llm) as server, server.connection() as connection:
        asyncio.run(steps.llm.start())
        send(connection, COMPLETIONS, **{**LONG, "prompt": [[5, 6], [7, 8]]}, stream=True, return_token_ids=True)
        server.wait_for_calls(2)
        steps.allow(2)
        read_until(connection, b'"index":1')
        steps.error = RuntimeError("the device is on fire")
        steps.allow()
        answer = read_until(connection, b"\r\n0\r\n\r\n")
        assert b"the device is on fire" in answer.split(b"data: ")[-1]
        assert b"[DONE]" not in answer
        steps.error = None
        server.check_idle()


def test_aborting_all_ends_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    with RunningServer(steps.llm) as server, server.connection() as connection, server.connection() as other:
        asyncio.run(steps.llm.start())
        steps.allow(1)
        send(connection, COMPLETIONS, **LONG, stream=True, return_token_ids=True)
        read_until(connection, b"data: ")
        send(other, COMPLETIONS, **LONG)
        server.wait_for_calls(2)
        asyncio.run(server.app.state.service.abort_all())
        steps.allow()
        assert b'"code": "aborted"' in read_until(connection, b"\r\n0\r\n\r\n")
        assert read_until(other, b"}}").startswith(b"HTTP/1.1 503")
        server.check_idle()


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[RunningServer]:
    """A server with a small buffer for a client that does not read."""
    with RunningServer(AsyncLLM(in_process=True), send_buffer=4096, max_stall=2.0, keep_alive_interval=0.1) as server:
        yield server


@pytest.mark.thorough
def test_a_slow_reader_gets_everything_and_delays_no_other_client(
    narrow_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = narrow_server
    change(monkeypatch, server, max_stall=60.0)
    body = {**LONG, "n": 2, "max_tokens": 300, "stream": True}
    with server.connection(receive_buffer=4096) as connection:
        send(connection, COMPLETIONS, **body)
        answer = read_until(connection, b"data: ")
        assert server.complete(prompt=[8, 9], max_tokens=20, ignore_eos=True)  # while the slow client does not read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # slow, but within the limit
        while b"data: [DONE]" not in answer:
            piece = connection.recv(1000)
            assert piece
            answer += piece
    assert answer.count(b'"finish_reason":"length"') == 2
    server.check_idle()
    assert server.observer.take_reasons() == ["length", "length"]


def test_a_client_that_does_not_read_is_disconnected(
    narrow_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = narrow_server
    with server.connection(receive_buffer=4096) as connection:
        send(connection, COMPLETIONS, **{**LONG, "n": 32}, stream=True)
        assert server.observer.has_ended.wait(60)
        server.check_idle()
        assert server.observer.take_reasons() == ["abort"]
        read = 0
        while piece := connection.recv(65536):  # what was already sent
            read += len(piece)
        assert read < 1_000_000  # of about 7 MB
        assert "a client did not read for 2 seconds: aborted" in caplog.text
    assert server.complete(prompt="a", max_tokens=1)


def test_many_concurrent_streams(server: RunningServer) -> None:
    async def follow(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {"prompt": [number % 1000 + 6, 5], "max_tokens": 8, "ignore_eos": True, "stream": True}
        writer.write(raw_request(COMPLETIONS, json.dumps(body).encode()))
        answer = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
        return answer.count(b'"finish_reason":"length"')

    async def check() -> None:
        async with asyncio.timeout(120):
            assert await asyncio.gather(*map(follow, range(500))) == [1] * 500

    asyncio.run(check())


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_stall is 0; it must be a number of seconds above 0"):
        ServerSettings(max_stall=0)
    with pytest.raises(ValueError, match="a name of the model is ''"):
        ServerSettings(model_name="")
    with pytest.raises(ValueError, match="has no option 'max_m'; did you mean 'max_n'"):
        ServerSettings(max_m=3)  # type: ignore[call-arg]
