"""How an event stream is split into chunks, and how failures are reported."""

import asyncio
import json
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from inflight.loadtest.openai_client import MAX_REASON, Chunk, EventReader, OpenAIClient, ServerError
from tests.loadtest.fake_server import Exchange, FakeServer, chat_chunk, text_chunk, usage_chunk

EVENTS = [
    b": keep-alive\n\n",
    b"event: message\r\ndata: " + json.dumps(text_chunk("é ☂\n")).encode() + b"\r\n\r\n",
    b"data:" + json.dumps(chat_chunk(content="a", role="assistant")).encode() + b"\n\n",
    b"data: " + json.dumps(chat_chunk(reasoning="hm")).encode() + b"\nid: 7\n\n",
    b"data: " + json.dumps(chat_chunk("stop")).encode() + b"\n\n",
    b"data: " + json.dumps(usage_chunk(3, 4)).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]


def told(chunks: list[Chunk]) -> list[tuple[str, str, bool, str | None]]:
    return [(chunk.text, chunk.reasoning, chunk.carries_tokens, chunk.finish_reason) for chunk in chunks]


@given(st.lists(st.integers(0, sum(map(len, EVENTS)))))
def test_chunks_do_not_depend_on_how_the_stream_arrives(cuts: list[int]) -> None:
    whole, stream, chunks = b"".join(EVENTS), EventReader(), list[Chunk]()
    places = [0, *sorted(cuts), len(whole)]
    for start, end in pairwise(places):
        chunks += stream.feed(whole[start:end])
    assert told(chunks) == [
        ("é ☂\n", "", True, None),
        ("a", "", True, None),
        ("", "hm", True, None),
        ("", "", False, "stop"),
        ("", "", False, None),
    ]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 4)
    assert stream.is_done


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ('{"error": {"message": "bad"}}', "error in the stream: bad"),
        ('{"error": {"code": 5}}', 'error in the stream: {"code":5}'),
        ('{"choices": 5}', 'an event cannot be read: {"choices": 5}'),
        ("{", "an event cannot be read: {"),
        ("x" * 5000, "an event cannot be read: " + "x" * MAX_REASON + "…"),
    ],
)
def test_bad_events_are_errors(payload: str, reason: str) -> None:
    stream, good = EventReader(), b"data: " + json.dumps(text_chunk("a")).encode() + b"\n\n"
    chunks = stream.feed(good + f"data: {payload}\n\n".encode() + good)
    assert [chunk.text for chunk in chunks] == ["a"]
    assert str(stream.failure) == reason


@pytest.mark.parametrize("nothing", ["null", "[]"])
def test_empty_fields_are_not_errors(nothing: str) -> None:
    (chunk,) = EventReader().feed(f'data: {{"choices": null, "usage": null, "error": {nothing}}}\n'.encode())
    assert told([chunk]) == [("", "", False, None)]


def test_models_are_listed() -> None:
    async def check() -> None:
        async with FakeServer().running() as server, OpenAIClient(server.url) as client:
            assert await client.models() == ["fake-1", "fake-2"]
            assert await client.first_model() == "fake-1"

    asyncio.run(check())


@pytest.mark.parametrize(("answer", "reason"), [("[]", "cannot be read"), ('{"data": []}', "names no model")])
def test_an_invalid_list_of_models_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: str, reason: str) -> None:
    async def models(server: FakeServer, request: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    monkeypatch.setattr(FakeServer, "_models", models)

    async def check() -> None:
        async with FakeServer().running() as server, OpenAIClient(server.url) as client:
            with pytest.raises(ServerError, match=reason):
                await client.first_model()

    asyncio.run(check())


def test_no_request_is_sent_on_a_connection_that_the_server_may_be_closing() -> None:
    peers = []

    async def behave(exchange: Exchange) -> None:
        peers.append(exchange.peer)
        await exchange.answer()

    async def check() -> None:
        async with FakeServer(behave).running() as server, OpenAIClient(server.url) as client:
            for _ in range(5):
                body = b'{"stream": true, "max_tokens": 2}'
                assert [chunk async for chunks in client.stream("/v1/completions", body) for chunk in chunks]

    asyncio.run(check())
    assert len(set(peers)) == 5


def test_a_reader_that_leaves_closes_the_connection() -> None:
    async def check() -> None:
        gone = asyncio.Event()

        async def behave(exchange: Exchange) -> None:
            try:
                while True:
                    await exchange.send(text_chunk("a"))
            except ConnectionError:
                gone.set()
                raise

        async with FakeServer(behave).running() as server, OpenAIClient(server.url) as client:
            answer = client.stream("/v1/completions", b'{"stream": true}')
            await anext(answer)
            await answer.aclose()
            async with asyncio.timeout(60):
                await gone.wait()

    asyncio.run(check())


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"it must be a URL such as http://127\.0\.0\.1:8000"):
        OpenAIClient(url)
