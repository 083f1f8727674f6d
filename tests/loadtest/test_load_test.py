"""Detecting what a server accepts, running a whole test accordingly, and the CPU time of processes."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inflight.loadtest.dialect import Dialect, Target, find_dialect
from inflight.loadtest.load_test import LoadPlan, LoadResult, cpu_seconds, load_test
from inflight.loadtest.openai_client import OpenAIClient, ServerError
from inflight.loadtest.workloads import Sketch
from tests.loadtest.fake_server import Behaviour, Exchange, FakeServer, answer_at_once, refuse

COMPLETIONS, CHAT = Target("completions", "m"), Target("chat", "m", 0.5, {"top_k": 3})


def test_the_load_generator_does_not_wait_for_torch() -> None:
    code = "import sys, inflight.loadtest.load_test, inflight.cli.bench_serve, aiohttp; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def picky(*fields: str, text_only: bool = False, vocab_size: int = 10**9, status: int = 400) -> Behaviour:
    """A server that refuses certain fields, or token ids."""

    async def behave(exchange: Exchange) -> web.Response | None:
        prompt = exchange.body.get("prompt", "")
        for field in fields:
            if field in exchange.body:
                return refuse(status, f"no {field}")
        if not isinstance(prompt, str) and (text_only or max(prompt) >= vocab_size):
            return refuse(status, "no such prompt")
        await exchange.answer()
        return None

    return behave


def perform(behave: Behaviour, target: Target, plan: LoadPlan) -> tuple[FakeServer, LoadResult, list[str]]:
    server, said = FakeServer(behave), list[str]()

    async def test() -> LoadResult:
        async with server.running(), OpenAIClient(server.url + "/v1/") as client:
            return await load_test(client, target, plan, say=said.append)

    return server, asyncio.run(test()), said


@pytest.mark.parametrize(
    ("behave", "dialect", "said"),
    [
        (answer_at_once, Dialect(20_000), []),
        (picky(vocab_size=1536), Dialect(1500), ["token ids below 1500"]),
        (picky(text_only=True), Dialect(None), ["words: it takes no token ids"]),
        (picky("ignore_eos", status=422), Dialect(20_000, False), ["does not take ignore_eos"]),
        (picky("stream_options"), Dialect(20_000, True, False), ["chunks are counted"]),
        (
            picky("ignore_eos", "stream_options", text_only=True, status=500),
            Dialect(None, False, False),
            ["words", "ignore_eos", "chunks are counted"],
        ),
    ],
)
def test_a_server_gets_only_fields_that_it_accepts(behave: Behaviour, dialect: Dialect, said: list[str]) -> None:
    server, result, lines = perform(behave, COMPLETIONS, LoadPlan(sketches=[Sketch(8, 3)] * 5))
    assert result.dialect == dialect
    assert [part in line for part, line in zip(said, lines, strict=True)] == [True] * len(said)
    assert (result.report.num_completed, result.report.num_output_tokens) == (5, 15)
    for body in server.bodies[-5:]:
        assert body["max_tokens"] == 3
        assert body["stream"] is True
        assert body.get("ignore_eos", False) is dialect.takes_ignore_eos
        assert ("stream_options" in body) is dialect.takes_stream_options
        assert isinstance(body["prompt"], str) == (dialect.vocab_size is None)


def test_a_chat_gets_text_as_a_message_and_the_extra_fields() -> None:
    server, result, said = perform(answer_at_once, CHAT, LoadPlan(sketches=[Sketch(8, 3), Sketch("hello", 4)]))
    assert (result.report.num_completed, said) == (2, [])
    assert {exchange.path for exchange in server.exchanges} == {"/v1/chat/completions"}
    body = server.bodies[-1]
    assert (body["model"], body["temperature"], body["top_k"]) == ("m", 0.5, 3)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert len(server.bodies[-2]["messages"][0]["content"].split()) == 8


def test_two_servers_get_identical_requests_regardless_of_earlier_ones() -> None:
    plan = LoadPlan(sketches=[Sketch(8, n) for n in (1, 2, 3)], num_prefix_tokens=4, request_rate=1000.0, seed=5)
    first, _, _ = perform(answer_at_once, COMPLETIONS, plan)
    warm = LoadPlan(
        sketches=plan.sketches, num_prefix_tokens=4, request_rate=1000.0, seed=5, num_warmups=2, max_concurrency=1
    )
    second, result, _ = perform(answer_at_once, COMPLETIONS, warm)
    assert sorted(map(str, first.bodies[1:])) == sorted(map(str, second.bodies[3:]))
    assert result.report.num_requests == 3
    warmups, measured = second.bodies[1:3], second.bodies[3:]
    assert sorted(body["max_tokens"] for body in warmups) == [1, 2]
    assert {len(body["prompt"]) for body in warmups} == {12}
    assert {str(body["prompt"][:4]) for body in warmups}.isdisjoint(str(body["prompt"][:4]) for body in measured)


def test_requests_of_a_trace_are_sent_at_its_times() -> None:
    sketches = [Sketch("c", 1, 0.03), Sketch("a", 1, 0.0), Sketch("b", 1, 0.01)]
    server, result, _ = perform(answer_at_once, COMPLETIONS, LoadPlan(sketches=sketches))
    assert [body["prompt"] for body in server.bodies[1:]] == ["a", "b", "c"]
    assert [record.scheduled for record in result.records] == [0.0, 0.01, 0.03]
    assert all(record.sent >= record.scheduled for record in result.records)


@pytest.mark.parametrize(("status", "num_asked"), [(401, 1), (404, 1), (503, 1), (400, 12)])
def test_a_server_that_accepts_nothing_is_an_error_with_its_message(status: int, num_asked: int) -> None:
    async def behave(exchange: Exchange) -> web.Response:
        return refuse(status, f"refusal {len(server.exchanges)}")

    server = FakeServer(behave)

    async def check() -> None:
        async with server.running(), OpenAIClient(server.url, "secret") as client:
            await find_dialect(client, COMPLETIONS, [20_000, 1500, None], 10.0)

    with pytest.raises(ServerError, match=f"HTTP {status}: refusal 1"):
        asyncio.run(check())
    assert len(server.exchanges) == num_asked
    assert server.exchanges[0].headers["Authorization"] == "Bearer secret"


def test_a_server_that_never_answers_is_an_error() -> None:
    async def behave(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ServerError, match=r"no answer to a first request within 0\.1 s"):
        perform(behave, COMPLETIONS, LoadPlan(sketches=[Sketch(1, 1)], timeout=0.1))


@pytest.mark.parametrize(
    ("target", "prompt", "complaint"),
    [(CHAT, [1, 2], "a prompt is token ids"), (COMPLETIONS, [{"role": "user", "content": "a"}], "a chat's messages")],
)
def test_a_prompt_kind_that_the_endpoint_does_not_support_is_refused(
    target: Target, prompt: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        perform(answer_at_once, target, LoadPlan(sketches=[Sketch(prompt, 1)]))


def test_a_requested_prompt_kind_is_the_only_one_tried() -> None:
    with pytest.raises(ServerError, match="no such prompt"):
        perform(picky(text_only=True), COMPLETIONS, LoadPlan(sketches=[Sketch(8, 1)], prompt_kind="ids"))
    for plan in (
        LoadPlan(sketches=[Sketch(8, 1)], prompt_kind="words"),
        LoadPlan(sketches=[Sketch(8, 1)], prompt_kind="ids", vocab_size=500),
    ):
        server, result, _ = perform(answer_at_once, COMPLETIONS, plan)
        assert result.dialect.vocab_size == plan.vocab_size
        assert len(server.exchanges) == 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU times are read from /proc")
def test_cpu_time_includes_all_descendants_of_a_process() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    child = f"{burn}print(flush=True); input()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
    parent += f"subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(process.pid) >= 0.55  # of a child that has ended and of a living one
        process.stdin.write(b"\n")
    with pytest.raises(ValueError, match=f"no process {process.pid}"):
        cpu_seconds(process.pid)
