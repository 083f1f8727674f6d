"""Request ids and the log: what a client gets back, what a line contains, and what is never logged."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from io import StringIO
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from inflight.contracts.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inflight.server.operations.access_log import AccessLog
from inflight.server.operations.logs import JsonLines, TextLines, current_request_id
from inflight.server.operations.middleware import RequestIds
from tests.coroutines import run
from tests.server.operations.serving import SmallServer, client_of, serving

logger = logging.getLogger("inflight.test")


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The logged lines, parsed from JSON."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    parent = logging.getLogger("inflight")
    parent.addHandler(handler)
    parent.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    parent.removeHandler(handler)
    parent.setLevel(logging.NOTSET)


def output_of(*reasons: Any) -> RequestOutput:
    """The output of a request for the secret, with a sequence of three tokens for each finish reason."""
    outputs = [CompletionOutput(i, "an answer", [1, 2, 3], finish_reason=reason) for i, reason in enumerate(reasons)]
    return RequestOutput("0", "the secret", [5] * 10, outputs, RequestMetrics(0.0, num_cached_tokens=4), True)


def telling(log: AccessLog) -> RequestIds:
    """An application that reports to the log what it generates, as endpoints do."""

    async def two_prompts(request: Request) -> Response:
        async def generate(*reasons: Any) -> None:
            for _ in range(3):
                log.produced("x", len(reasons), 0.0)
            log.finished("x", output_of(*reasons), reasons[0])

        await asyncio.gather(generate("stop", "length"), generate("length"))
        return JSONResponse({"id": request.state.request_id})

    async def stream(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                for _ in range(100):
                    log.produced("x", 7, 0.0)
                    yield b"piece"
                    await asyncio.sleep(0.01)
            finally:
                log.finished("x", None, "abort")

        return StreamingResponse(pieces())

    async def refuse(request: Request) -> Response:
        log.finished("x", None, "refused")
        logger.info("two\nlines")
        return PlainTextResponse("no", 400)

    routes = [Route("/two", two_prompts), Route("/stream", stream), Route("/refuse", refuse)]
    return RequestIds().middleware(log.middleware(Starlette(routes=routes)))


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("job-17:3_a.b", True),
        ("x" * 128, True),
        (None, False),
        ("", False),
        ("x" * 129, False),
        ("two words", False),
        ('"}, {"', False),
        ("caf\u00e9", False),
    ],
)
def test_a_valid_request_id_is_kept_and_any_other_is_replaced(given: str | None, is_kept: bool) -> None:
    async def show(request: Request) -> Response:
        assert request.state.request_id == current_request_id.get()
        return PlainTextResponse(request.state.request_id)

    async def check() -> None:
        async with client_of(RequestIds().middleware(Starlette(routes=[Route("/", show)]))) as client:
            seen = set()
            for _ in range(2):
                async with client.get("/", headers={} if given is None else {"X-Request-Id": given}) as answer:
                    name = await answer.text()
                    assert answer.headers.getall("x-request-id") == [name]
                    assert answer.headers.getall("request-id") == [name]
                    seen.add(name)
            if is_kept:
                assert seen == {given}
            else:
                assert len(seen) == 2
                assert all(re.fullmatch("req_[0-9a-f]{32}", name) for name in seen)

    run(check())


def test_client_libraries_find_the_request_id() -> None:
    async def check() -> None:
        async def models(request: Request) -> Response:
            return JSONResponse({"id": "m", "object": "model", "created": 0, "owned_by": "me"})

        app = RequestIds().middleware(Starlette(routes=[Route("/v1/models/m", models)]))
        async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            model = await client.models.retrieve("m", extra_headers={"X-Request-Id": "mine"})
            assert model._request_id == "mine"

    run(check())


def test_a_line_reports_the_result_of_a_request(lines: Callable[[], list[dict[str, Any]]]) -> None:
    async def check() -> None:
        async with client_of(telling(AccessLog())) as client:
            async with client.get("/two?api_key=private", headers={"X-Request-Id": "mine"}) as answer:
                assert await answer.json() == {"id": "mine"}
            async with client.get("/refuse", headers={"X-Request-Id": "other"}) as answer:
                assert answer.status == 400
            async with client.get("/no%0Awhere\u00e9") as answer:
                assert answer.status == 404

    run(check())
    two, inner, refused, nowhere = lines()
    seconds, time = two.pop("seconds"), two.pop("time")
    assert seconds >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", time)
    assert re.fullmatch(r"GET /two 200 in \d+\.\d{3} s", two.pop("message"))
    assert two == {
        "level": "info",
        "logger": "inflight.access",
        "request_id": "mine",
        "method": "GET",
        "path": "/two",
        "status": 200,
        "client": "127.0.0.1",
        "finish_reasons": ["stop", "length", "length"],
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "cached_tokens": 8,
    }
    assert (inner["message"], inner["request_id"]) == ("two\nlines", "other")
    assert (refused["status"], refused["finish_reasons"], refused["request_id"]) == (400, ["refused"], "other")
    assert "prompt_tokens" not in refused
    assert (nowhere["path"], nowhere["status"]) == ("/no%0Awhere%C3%A9", 404)


@pytest.mark.parametrize("with_text", [False, True])
def test_text_is_logged_only_if_that_is_enabled(lines: Callable[[], list[dict[str, Any]]], with_text: bool) -> None:
    async def check() -> None:
        async with client_of(telling(AccessLog(with_text=with_text))) as client, client.get("/two"):
            pass

    run(check())
    (line,) = lines()
    if with_text:
        prompts = [(text["prompt"], text["answers"]) for text in line["texts"]]
        assert prompts == [("the secret", ["an answer"] * 2), ("the secret", ["an answer"])]
    else:
        assert not re.search("secret|answer", json.dumps(line))


def test_disconnected_clients_and_errors_are_logged_too(lines: Callable[[], list[dict[str, Any]]]) -> None:
    async def check() -> None:
        log, server = AccessLog(), SmallServer()
        async with client_of(telling(log)) as client:
            async with client.get("/stream") as answer:
                await answer.content.readexactly(5)
                answer.close()
            while not lines():
                await asyncio.sleep(0)
        async with client_of(log.middleware(server.app)) as client:
            async with client.get("/broken", headers={"Connection": "close"}) as answer:
                assert answer.status == 500
            leaving = asyncio.create_task(client.get("/gone"))
            while not server.num_calls:
                await asyncio.sleep(0)
            leaving.cancel()
            while not server.num_left:
                await asyncio.sleep(0)

    run(check())
    left, broken, gone = lines()
    assert (left["status"], left["finish_reasons"]) == (200, ["abort"])
    assert left["completion_tokens"] % 7 == 0
    assert (broken["status"], "exception" in broken) == (500, False)
    assert gone["path"] == "/gone"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_health_checks_are_logged_only_if_everything_is_logged(
    lines: Callable[[], list[dict[str, Any]]], level: int
) -> None:
    paths = ["/health", "/metrics", "/version"]

    async def check() -> None:
        async with client_of(AccessLog().middleware(SmallServer().app)) as client:
            for path in paths:
                async with client.get(path) as answer:
                    assert answer.status == 200

    logging.getLogger("inflight").setLevel(level)
    run(check())
    assert [line["path"] for line in lines()] == (paths if level == logging.DEBUG else [])


SCRIPT = """
import logging, sys
from inflight.server.operations.logs import set_up_logging

set_up_logging(as_json=sys.argv[1] == "json")
logging.getLogger("uvicorn.error").warning("listening to %s", "many")
logging.getLogger("uvicorn.error").info("not told")
logging.getLogger("uvicorn.access").info("not told")
logging.getLogger("inflight").debug("not told")
try:
    raise KeyError("lost")
except KeyError:
    logging.getLogger("inflight").exception("it broke")
"""


def test_all_loggers_of_a_process_use_the_same_format() -> None:
    def stderr(style: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", SCRIPT, style], capture_output=True, text=True, timeout=60)
        assert done.stdout == ""
        return done.stderr.splitlines()

    listening, broke = (json.loads(line) for line in stderr("json"))
    assert (listening["logger"], listening["message"]) == ("uvicorn.error", "listening to many")
    assert (broke["level"], broke["message"]) == ("error", "it broke")
    assert "KeyError: 'lost'" in broke["exception"]
    first, second, *rest = stderr("text")
    assert first.endswith("WARNING listening to many")
    assert second.endswith("ERROR it broke")
    assert rest[-1] == "KeyError: 'lost'"


def test_lines_for_people_have_the_request_and_its_client() -> None:
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, "GET %s", ("/b",), None)
    assert TextLines().format(record).endswith(" INFO GET /b")
    record.fields = {"client": "192.0.2.7"}
    token = current_request_id.set("req_1")
    assert TextLines().format(record).endswith(" INFO GET /b (req_1, client 192.0.2.7)")
    current_request_id.reset(token)
    assert TextLines().format(record).endswith(" INFO GET /b (client 192.0.2.7)")
