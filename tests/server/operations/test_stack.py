"""All server layers together: each layer sees what it must, and refused requests are logged and counted."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import EngineStats
from inflight.server.operations import stack
from inflight.server.operations.logs import JsonLines
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import Operations
from tests.coroutines import run
from tests.server.operations.serving import COMPLETIONS, SmallServer, client_of, connected, serving

KEY = {"Authorization": "Bearer right"}
PAGE = {"Origin": "https://page.example"}


async def no_stats(seconds: float) -> dict[int, EngineStats | None]:
    return {}


def operations(**settings: Any) -> Operations:
    """Operations with a key, room for one request, and bodies of up to 100 bytes."""
    given = {"api_keys": ("right",), "max_body_size": 100, "max_requests": 1} | settings
    return Operations(OperatorSettings(**given), "tiny", no_stats)


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


def test_a_refused_request_gets_an_id_and_is_logged_and_counted(log: StringIO) -> None:
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
                await ask(client, 401)  # a request without a key does not learn how busy the server is
                around.drain.begin()
                await ask(client, 503, **KEY)
                async with client.get("/health") as answer:
                    assert (answer.status, await answer.json()) == (503, {"status": "draining"})
                server.gate.set()
                assert await stream.read() == b"last"
            lines = [json.loads(line) for line in log.getvalue().splitlines()]
            assert [line["status"] for line in lines] == [200, 401, 413, 429, 401, 503, 200]
            assert [line["request_id"] for line in lines][:-1] == names
            text = (await around.metrics.scrape()).decode()
            for status, path, num in (
                *((401, "other", 2), (503, "other", 1), (413, "other", 1)),
                *((503, "/health", 1), (200, COMPLETIONS, 2)),
            ):
                assert f'path="{path}",status="{status}"}} {num}.0' in text
        assert server.num_calls == 2

    run(check())


def test_a_client_that_leaves_before_the_answer_is_logged(log: StringIO) -> None:
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


def test_other_origins_are_allowed_only_if_configured() -> None:
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
        around = operations(cors_origins=(page,))
        assert await answers(around.surround(SmallServer().app)) == [(200, page), (200, page), (401, page)]
        around = operations(cors_origins=("https://other.example",))
        assert [origin for _, origin in await answers(around.surround(SmallServer().app))] == [None] * 3

    run(check())


def test_keys_are_read_from_the_settings_a_file_and_the_environment(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "keys").write_text("of-file\n")
        settings = OperatorSettings(api_keys=("given",), api_key_file=str(tmp_path / "keys"))
        around = Operations(settings, "tiny", no_stats, environment_keys="of-environment")
        async with client_of(around.surround(SmallServer().app)) as client:
            for key, status in (("given", 200), ("of-file", 200), ("of-environment", 200), ("other", 401)):
                async with client.get("/v1/models", headers={"x-api-key": key}) as answer:
                    assert answer.status == status
        around = Operations(OperatorSettings(), "tiny", no_stats)
        async with client_of(around.surround(SmallServer().app)) as client, client.get("/v1/models") as answer:
            assert answer.status == 200

    run(check())


def test_traces_are_made_only_if_an_endpoint_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(stack, "exporting_provider", lambda endpoint: provider)

    async def check() -> None:
        around = operations(traces_endpoint="http://127.0.0.1:4318/v1/traces")
        around.started("a", 1, SamplingParams())
        around.produced("a", 3, time.monotonic())
        around.finished("a", None, "abort")
        assert [span.name for span in exporter.get_finished_spans()] == ["text_completion tiny"]
        text = (await around.metrics.scrape()).decode()
        assert 'inflight:request_aborts_total{model_name="tiny",reason="abort"} 1.0' in text
        assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
        await around.close()
        around.started("b", 1, SamplingParams())
        around.finished("b", None, "abort")
        assert len(exporter.get_finished_spans()) == 1, "the provider was shut down"

    run(check())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_body_size": 0}, "max_body_size is 0; it must be an integer of at least 1"),
        ({"max_requests": 0}, "max_requests is 0; it must be an integer of at least 1"),
        ({"grace_period": -1.0}, "grace_period is -1.0; it must be a number of seconds of at least 0"),
        ({"log_format": "xml"}, "log_format is 'xml'; it must be one of 'text', 'json'"),
        ({"log_text": "no"}, "log_text is 'no'; it must be True or False"),
        ({"traces_endpoint": "localhost"}, "traces_endpoint is 'localhost'; it must be a URL"),
        ({"max_request": 1}, "OperatorSettings has no option 'max_request'; did you mean 'max_requests'?"),
        ({"api_key_file": "/nowhere"}, "the file of API keys '/nowhere' cannot be read"),
        ({"api_keys": ("two words",)}, "a key is empty or has spaces"),
    ],
)
def test_bad_settings_are_refused_with_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        operations(**settings)


def test_a_hundred_concurrent_streams_all_run_to_their_end() -> None:
    async def check() -> None:
        server = SmallServer()
        around = operations(max_requests=None, api_keys=())
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
