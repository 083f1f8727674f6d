"""Exact measurements, with a clock that the test moves and real sockets."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inflight.loadtest.openai_client import OpenAIClient
from inflight.loadtest.runner import LoadRequest, RequestRecord, Tally, allow_connections, run_load
from tests.loadtest.fake_server import Exchange, FakeServer, chat_chunk, refuse, text_chunk, usage_chunk
from tests.ports import unused_port

PATH = "/v1/completions"


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine with a time limit."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


class ScriptedClock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self._time = 100.0
        self._was_read = asyncio.Event()
        self._moved = asyncio.Condition()

    def now(self) -> float:
        self._was_read.set()
        return self._time

    async def sleep_until(self, moment: float) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._time >= moment)

    async def move(self, seconds: float) -> None:
        """Move the clock to this number of seconds after the start."""
        async with self._moved:
            self._time = 100.0 + seconds
            self._moved.notify_all()

    async def at(self, seconds: float, deed: Awaitable[None]) -> None:
        """Run something at that time, and wait until the client has read the clock for it."""
        await self.move(seconds)
        self._was_read.clear()
        await deed
        await self._was_read.wait()


def requests(*arrivals: float, num_output_tokens: int = 4) -> list[LoadRequest]:
    body = msgspec.json.encode({"prompt": [1, 2], "max_tokens": num_output_tokens, "stream": True})
    return [LoadRequest(arrival, body, num_output_tokens, 2) for arrival in arrivals]


async def hold(exchange: Exchange) -> None:
    """Let the test answer."""
    await asyncio.Event().wait()


class Script:
    """A run in which the test sets the time of every event."""

    def __init__(self, planned: Sequence[LoadRequest], **options: Any) -> None:
        self.clock = ScriptedClock()
        self.tallies: list[tuple[int, int, int]] = []
        self._planned, self._options = planned, options

    async def __aenter__(self) -> "Script":
        self._ends = [asyncio.Event() for _ in self._planned]
        self.server = FakeServer(self._behave)
        self._running = self.server.running()
        await self._running.__aenter__()
        self._client = await OpenAIClient(self.server.url).__aenter__()
        self._run = asyncio.create_task(
            run_load(self._client, PATH, self._planned, clock=self.clock, watch=self._observe, **self._options)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)
        await self._running.__aexit__(None, None, None)

    async def say(self, number: int, seconds: float, *events: Any) -> None:
        """Send these events to the request with this number at that time, in one write."""
        exchange = await self.server.exchange(number)
        await self.clock.at(seconds, exchange.send(*events))

    async def end(self, number: int) -> None:
        """End the answer."""
        self._ends[number].set()

    async def records(self) -> list[RequestRecord]:
        return await self._run

    async def _behave(self, exchange: Exchange) -> None:
        await self._ends[self.server.exchanges.index(exchange)].wait()

    def _observe(self, tally: Tally) -> None:
        self.tallies.append((tally.num_sent, tally.num_completed, tally.num_failed))


def test_times_of_a_request_are_those_of_its_chunks() -> None:
    async def check() -> None:
        async with Script(requests(0.0)) as script:
            await script.say(0, 0.5, text_chunk("a"))
            await script.say(0, 0.75, text_chunk("b"), text_chunk("c"))  # arrive together
            await script.say(0, 2.0, text_chunk("d"))
            await script.say(0, 2.5, text_chunk("", "length"))  # the end, no token
            await script.say(0, 9.0, usage_chunk(2, 5), "[DONE]")
            await script.end(0)
            (record,) = await script.records()
        assert (record.scheduled, record.sent, record.failure) == (0.0, 0.0, None)
        assert list(record.token_times) == [0.5, 0.75, 0.75, 2.0]
        assert record.time_to_first_token == 0.5
        assert record.latency == 2.5  # data after the end of the answer does not count
        assert record.inter_token_latencies == [0.25, 0.0, 1.25]
        assert (record.num_prompt_tokens, record.num_output_tokens, record.is_counted) == (2, 5, True)
        assert record.time_per_output_token == (2.5 - 0.5) / (5 - 1)
        assert script.tallies == [(1, 0, 0), (1, 1, 0)]

    run(check())


def test_reasoning_and_tool_calls_are_first_tokens_and_roles_and_keepalives_are_not() -> None:
    async def check() -> None:
        async with Script(requests(0.0, 0.0, 0.0)) as script:
            for number in range(3):
                await script.say(number, 1.0, chat_chunk(role="assistant", content=""))
                exchange = await script.server.exchange(number)
                await exchange.send(b": keep-alive\n\n")
            call = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
            await script.say(0, 2.0, chat_chunk(reasoning_content="hm"))
            await script.say(1, 3.0, chat_chunk(tool_calls=call))
            await script.say(2, 4.0, chat_chunk(tool_calls=None, content="hello"))
            for number in range(3):
                await script.say(number, 5.0, chat_chunk("stop"), "[DONE]")
                await script.end(number)
            records = await script.records()
        assert sorted(record.time_to_first_token for record in records) == [2.0, 3.0, 4.0]
        assert {record.latency for record in records} == {5.0}

    run(check())


def test_without_counts_each_text_chunk_is_a_token_and_the_given_prompt_length_is_used() -> None:
    async def check() -> None:
        async with Script(requests(0.0)) as script:
            await script.say(0, 1.0, text_chunk("a"), text_chunk("b"), text_chunk("", "stop"))
            await script.end(0)  # and no [DONE]
            (record,) = await script.records()
        assert record.failure is None
        assert (record.num_prompt_tokens, record.num_output_tokens, record.is_counted) == (2, 2, False)

    run(check())


def test_tokens_without_text_count_and_the_first_token_is_at_the_end_at_the_latest() -> None:
    async def check() -> None:
        async with Script(requests(0.0)) as script:
            await script.say(0, 3.0, text_chunk("", "length"), usage_chunk(2, 4))
            await script.end(0)
            (record,) = await script.records()
        assert (record.num_output_tokens, record.failure) == (4, None)
        assert (record.time_to_first_token, record.latency, record.time_per_output_token) == (3.0, 3.0, 0.0)

    run(check())


def test_requests_are_sent_on_time_even_if_the_server_is_busy() -> None:
    async def check() -> None:
        async with Script(requests(0.0, 2.0, 2.0, 5.0)) as script:
            await script.server.exchange(0)
            await script.clock.move(2.0)
            await script.server.exchange(2)  # no request has been answered
            assert len(script.server.exchanges) == 3
            await script.clock.move(5.0)
            await script.server.exchange(3)
            for number in range(4):
                await script.say(number, 6.0, text_chunk("a", "stop"))
                await script.end(number)
            records = await script.records()
        assert [record.sent for record in records] == [0.0, 2.0, 2.0, 5.0]
        assert [record.time_to_first_token for record in records] == [6.0, 4.0, 4.0, 1.0]

    run(check())


def test_time_held_back_by_the_client_counts_as_waiting() -> None:
    async def check() -> None:
        async with Script(requests(0.0, 1.0, 1.0), max_concurrency=1) as script:
            await script.server.exchange(0)
            await script.clock.move(1.0)
            for number, seconds in enumerate((3.0, 7.0, 8.0)):
                await script.say(number, seconds, text_chunk("a", "stop"))
                assert len(script.server.exchanges) == number + 1
                await script.end(number)
            records = await script.records()
        assert [record.sent for record in records] == [0.0, 3.0, 7.0]
        assert [record.time_to_first_token for record in records] == [3.0, 6.0, 7.0]
        assert [record.latency for record in records] == [3.0, 6.0, 7.0]

    run(check())


async def too_many(exchange: Exchange) -> web.Response:
    return refuse(429, "too many requests")


async def plain_text_error(exchange: Exchange) -> web.Response:
    return web.Response(status=500, text="Internal\nServer Error")


async def fastapi_error(exchange: Exchange) -> web.Response:
    return web.json_response({"detail": "no such field"}, status=422)


async def ends_early(exchange: Exchange) -> None:
    await exchange.send(text_chunk("a"))


async def breaks_off(exchange: Exchange) -> None:
    await exchange.send(text_chunk("a"))
    exchange.break_off()


async def breaks_off_at_once(exchange: Exchange) -> None:
    exchange.break_off()


async def error_event(exchange: Exchange) -> None:
    await exchange.send(text_chunk("a"), {"error": {"message": "the engine died", "code": 500}})


async def error_event_as_text(exchange: Exchange) -> None:
    await exchange.send({"error": "out of memory"})


async def garbage(exchange: Exchange) -> None:
    await exchange.send("{not json")


async def no_stream(exchange: Exchange) -> web.Response:
    return web.json_response({"choices": [{"text": "a"}]})


async def nothing(exchange: Exchange) -> None:
    await exchange.send("[DONE]")


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (too_many, "HTTP 429: too many requests"),
        (plain_text_error, "HTTP 500: Internal Server Error"),
        (fastapi_error, "HTTP 422: no such field"),
        (ends_early, "the answer ended unfinished (text/event-stream)"),
        (breaks_off, "the connection broke during the answer"),
        (breaks_off_at_once, "the server closed the connection without an answer"),
        (error_event, "error in the stream: the engine died"),
        (error_event_as_text, "error in the stream: out of memory"),
        (garbage, "an event cannot be read: {not json"),
        (no_stream, "the answer ended unfinished (application/json)"),
        (nothing, "the answer is empty"),
    ],
)
def test_a_failure_has_a_reason_and_does_not_affect_other_requests(behave: Any, reason: str) -> None:
    async def second_fails(exchange: Exchange) -> web.Response | None:
        if exchange.body["max_tokens"] == 7:
            return await behave(exchange)  # type: ignore[no-any-return]
        await exchange.answer()
        return None

    async def check() -> None:
        planned = [*requests(0.0), *requests(0.0, num_output_tokens=7), *requests(0.0)]
        tallies = []
        async with FakeServer(second_fails).running() as server, OpenAIClient(server.url) as client:
            records = await run_load(
                client,
                PATH,
                planned,
                watch=lambda tally: tallies.append((tally.num_completed, tally.num_failed)),
            )
        assert [record.failure for record in records] == [None, reason, None]
        assert records[1].finished >= records[1].sent
        assert tallies[-1] == (2, 1)

    run(check())


def test_a_request_over_its_time_limit_fails_and_does_not_affect_others() -> None:
    async def behave(exchange: Exchange) -> None:
        await (hold(exchange) if exchange.body["max_tokens"] == 7 else exchange.answer())

    async def check() -> None:
        async with FakeServer(behave).running() as server, OpenAIClient(server.url) as client:
            held, others = await asyncio.gather(
                run_load(client, PATH, requests(0.0, num_output_tokens=7), timeout=0.2),
                run_load(client, PATH, requests(0.0, 0.0)),
            )
        assert [record.failure for record in (*held, *others)] == ["not finished within 0.2 s", None, None]
        assert held[0].finished >= held[0].sent

    run(check())


def test_a_missing_server_is_a_reason_for_failure() -> None:
    async def check() -> None:
        async with OpenAIClient(f"http://127.0.0.1:{port}") as client:
            (record,) = await run_load(client, PATH, requests(0.0))
        assert record.failure is not None
        assert record.failure == "cannot connect: connection refused"

    with unused_port() as port:
        run(check())


def test_a_thousand_concurrent_streams() -> None:
    together = asyncio.Event()
    allow_connections(2 * 1000)  # both ends of each connection are in this process

    async def check() -> None:
        async def behave(exchange: Exchange) -> None:
            await exchange.send(text_chunk("a"))
            if len(server.exchanges) == 1000:
                together.set()
            await together.wait()  # all requests have started before any continues
            await exchange.answer()

        server = FakeServer(behave)
        async with server.running(), OpenAIClient(server.url) as client:
            records = await run_load(client, PATH, requests(*[0.0] * 1000))
        assert {(record.failure, record.num_output_tokens, len(record.token_times)) for record in records} == {
            (None, 4, 5)
        }

    run(check())
