"""Limits on body sizes, slow senders and concurrent requests; streams are still passed on as they arrive."""

import asyncio
import json
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from inflight.server.operations import limits
from inflight.server.operations.limits import BodyLimit, ConcurrencyLimit
from tests.coroutines import run
from tests.server.operations.serving import COMPLETIONS, SmallServer, client_of, connected, read_answer, serving

STREAM = {"stream": True}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\n"


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 7):
        yield b"x" * min(7, size - start)


def test_a_body_up_to_the_limit_is_accepted_whole_and_a_larger_one_is_refused() -> None:
    async def check() -> None:
        server = SmallServer()
        async with client_of(BodyLimit(100).middleware(server.app)) as client:
            for size in (0, 1, 100):
                for data in (b"x" * size, in_chunks(size)):
                    async with client.post(COMPLETIONS, data=data) as answer:
                        assert (answer.status, await answer.text()) == (200, str(size))
            assert server.num_calls == 6
            for size in (101, 10_000):
                for data in (b"x" * size, in_chunks(size)):
                    async with client.post(COMPLETIONS, data=data) as answer:
                        assert answer.status == 413
                        error = (await answer.json())["error"]
                        assert error["code"] == "request_too_large"
                        assert "larger than 100 bytes" in error["message"]
            assert server.num_calls == 6

    run(check())


def test_a_compressed_body_is_refused_by_the_name_of_its_coding() -> None:
    async def check() -> None:
        server = SmallServer()
        async with client_of(BodyLimit(100).middleware(server.app)) as client:
            for path in (COMPLETIONS, "/v1/files"):
                async with client.post(path, data=b"x", headers={"Content-Encoding": "gzip"}) as answer:
                    assert answer.status == 415
                    assert "Content-Encoding is 'gzip'" in (await answer.json())["error"]["message"]
            async with client.post(COMPLETIONS, data=b"x", headers={"Content-Encoding": "identity"}) as answer:
                assert answer.status == 200
            assert server.num_calls == 1

    run(check())


def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_sent() -> None:
    async def check() -> None:
        async with serving(BodyLimit(100).middleware(SmallServer().app)) as url:
            for expect in ("", "Expect: 100-continue\r\n"):
                async with connected(url) as (reader, writer):
                    writer.write(f"{HEAD}{expect}Content-Length: 1000000000000\r\n\r\n".encode())
                    status, headers, _ = await read_answer(reader)
                    assert (status, headers["connection"]) == (413, "close")
                    if not expect:
                        writer.write_eof()
                    assert await reader.read() == b""

    run(check())


def test_a_sender_that_never_stops_gets_an_answer_and_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS_TO_READ", 0.3)

    async def check() -> None:
        server = SmallServer()
        async with serving(BodyLimit(100).middleware(server.app)) as url, connected(url) as (reader, writer):
            writer.write(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())

            async def send() -> None:
                while True:
                    writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                    await writer.drain()

            sending = asyncio.create_task(send())
            assert (await read_answer(reader))[0] == 413
            with pytest.raises(ConnectionError):
                await sending
            assert server.num_calls == 0

    run(check())


def test_waiting_for_a_missing_body_has_a_time_limit() -> None:
    async def check() -> None:
        server = SmallServer()
        async with (
            serving(BodyLimit(100, seconds=0.2).middleware(server.app)) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(f"{HEAD}Content-Length: 50\r\n\r\nhalf".encode())
            status, headers, body = await read_answer(reader)
            assert (status, headers["connection"]) == (408, "close")
            assert "0.2 seconds" in json.loads(body)["error"]["message"]
            assert await reader.read() == b""
            assert server.num_calls == 0

    run(check())


def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        server = SmallServer()
        limit = ConcurrencyLimit(1)
        async with serving(limit.middleware(BodyLimit(100).middleware(server.app))) as url:
            async with connected(url) as (_, writer):
                writer.write(f"{HEAD}Content-Length: 50\r\n\r\nhalf".encode())
                while not limit._num_inside:
                    await asyncio.sleep(0)
            while limit._num_inside:
                await asyncio.sleep(0)
            async with connected(url) as (reader, writer):
                writer.write(f"{HEAD}Content-Length: 4\r\n\r\nhalf".encode())
                assert (await read_answer(reader))[0] == 200
        assert server.num_calls == 1

    run(check())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 100, b"GET\r\n\r\n", f"{HEAD}Content-Length: -1\r\n\r\n".encode()])
def test_a_malformed_request_does_no_harm(garbage: bytes) -> None:
    async def check() -> None:
        server = SmallServer()
        async with serving(ConcurrencyLimit(1).middleware(BodyLimit(100).middleware(server.app))) as url:
            async with connected(url) as (reader, writer):
                writer.write(garbage)
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            async with connected(url) as (reader, writer):
                writer.write(f"{HEAD}Content-Length: 4\r\n\r\ngood".encode())
                assert (await read_answer(reader))[0] == 200

    run(check())


def test_streams_are_passed_on_as_they_arrive_and_end_when_the_client_leaves() -> None:
    async def check() -> None:
        server = SmallServer()
        async with client_of(ConcurrencyLimit(5).middleware(BodyLimit(100).middleware(server.app))) as client:
            async with client.post(COMPLETIONS, json=STREAM) as answer:
                assert await answer.content.readexactly(5) == b"first"  # while the rest is held back
                server.gate.set()
                assert await answer.read() == b"last"
            server.gate.clear()
            async with client.post(COMPLETIONS, json=STREAM) as answer:
                await answer.content.readexactly(5)
                answer.close()
            while not server.num_left:
                await asyncio.sleep(0)
            leaving, num_calls = asyncio.create_task(client.get("/gone")), server.num_calls
            while server.num_calls == num_calls:
                await asyncio.sleep(0)
            leaving.cancel()
            while server.num_left < 2:
                await asyncio.sleep(0)

    run(check())


def test_requests_over_the_concurrency_limit_are_told_to_retry() -> None:
    async def check() -> None:
        server = SmallServer()
        async with client_of(ConcurrencyLimit(2, retry_after=7).middleware(server.app)) as client:
            streams = [await client.post(COMPLETIONS, json=STREAM) for _ in range(2)]
            async with client.post(COMPLETIONS, data=b"") as answer:
                assert (answer.status, answer.headers["retry-after"]) == (429, "7")
                assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
            async with client.get("/health") as answer:
                assert answer.status == 200
            assert server.num_calls == 2
            server.gate.set()
            assert [await stream.read() for stream in streams] == [b"firstlast"] * 2
            for _ in range(3):
                async with client.post(COMPLETIONS, data=b"") as answer:
                    assert answer.status == 200
                async with client.get("/broken", headers={"Connection": "close"}) as answer:
                    assert answer.status == 500

    run(check())


def test_client_libraries_understand_the_refusals() -> None:
    async def check() -> None:
        async with serving(ConcurrencyLimit(0).middleware(SmallServer().app)) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
                with pytest.raises(openai.RateLimitError) as refused:
                    await client.models.list()
                assert refused.value.code == "rate_limit_exceeded"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as other:
                with pytest.raises(anthropic.RateLimitError) as caught:
                    await other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
                assert caught.value.type == "rate_limit_error"
        async with (
            serving(BodyLimit(10).middleware(SmallServer().app)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            with pytest.raises(openai.APIStatusError, match="larger than 10 bytes") as too_large:
                await client.completions.create(model="m", prompt="long " * 100_000)
            assert too_large.value.status_code == 413

    run(check())
