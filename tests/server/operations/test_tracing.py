"""Traces: the content of a span, its parent, and its delivery to a collector."""

import asyncio
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from inflight.contracts.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.operations import tracing as tracing_module
from inflight.server.operations.tracing import Tracing, exporting_provider
from tests.coroutines import run
from tests.server.operations.serving import client_of, serving

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PARAMS = SamplingParams(n=2, temperature=0.5, top_p=0.9, top_k=40, max_tokens=9, seed=3, stop="x", presence_penalty=0.1)


@pytest.fixture
def spans() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def output_of(error: str | None = None) -> RequestOutput:
    outputs = [CompletionOutput(i, "an answer", [1, 2, 3], finish_reason="stop") for i in range(2)]
    metrics = RequestMetrics(10.0, first_scheduled_time=10.25, num_cached_tokens=4)
    return RequestOutput("a", "the secret", [5] * 10, outputs, metrics, True, error)


def served(tracing: Tracing, **telemetry: Any) -> Any:
    """A server that reports two prompts for each request."""
    app = FastAPI(telemetry=telemetry or None)  # type: ignore[arg-type]

    async def generate(request: Request) -> Response:
        async def follow(request_id: str) -> None:
            tracing.started(request_id, 1, SamplingParams())
            await asyncio.sleep(0)
            tracing.finished(request_id, output_of(), "stop")

        await asyncio.gather(follow("a"), follow("b"))
        return PlainTextResponse("")

    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        app.add_api_route(path, generate, methods=["POST"])
    return tracing.middleware(app)


def test_a_span_describes_the_request_and_its_result(spans: tuple[TracerProvider, InMemorySpanExporter]) -> None:
    provider, exporter = spans
    tracing = Tracing("tiny", provider)
    tracing.started("a", 2, PARAMS)
    tracing.produced("a", 1, time.monotonic() + 5)
    tracing.produced("a", 1, time.monotonic() + 50)
    assert not exporter.get_finished_spans()
    tracing.finished("a", output_of(), "stop")
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion tiny",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(5, abs=1)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "inflight",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.presence_penalty": 0.1,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": "a",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.time_in_queue": 0.25,
    }
    assert "secret" not in str(attributes)
    assert not tracing._spans
    assert not tracing._waiting


def test_failed_requests_have_error_status(spans: tuple[TracerProvider, InMemorySpanExporter]) -> None:
    provider, exporter = spans
    tracing = Tracing("tiny", provider)
    for reason, output in (("refused", None), ("abort", None), ("timeout", None), ("error", output_of("on fire"))):
        tracing.started(reason, 1, SamplingParams())
        tracing.finished(reason, output, reason)
    tracing.finished("unknown", None, "stop")
    tracing.produced("unknown", 1, 0.0)
    ended = [(span.attributes["error.type"], span.status.description) for span in exporter.get_finished_spans()]
    assert ended == [("refused", None), ("abort", None), ("timeout", None), ("error", "on fire")]
    assert {span.status.status_code for span in exporter.get_finished_spans()} == {StatusCode.ERROR}


def test_spans_are_children_of_the_client_spans(spans: tuple[TracerProvider, InMemorySpanExporter]) -> None:
    provider, exporter = spans

    async def ask(client: aiohttp.ClientSession, path: str, **headers: str) -> list[ReadableSpan]:
        async with client.post(path, headers=headers) as answer:
            assert answer.status == 200
        ended = list(exporter.get_finished_spans())
        exporter.clear()
        return ended

    async def check() -> None:
        async with client_of(served(Tracing("tiny", provider))) as client:
            for path, name in (("/v1/completions", "text_completion tiny"), ("/v1/messages", "chat tiny")):
                both = await ask(client, path, traceparent=TRACEPARENT, tracestate="vendor=1")
                assert [span.name for span in both] == [name] * 2
                for span in both:
                    assert f"{span.context.trace_id:032x}" == TRACE_ID
                    assert span.parent is not None
                    assert f"{span.parent.span_id:016x}" == SPAN_ID
                    assert span.context.trace_state.get("vendor") == "1"
            for traceparent in ("", "garbage", "00-" + "0" * 32 + f"-{SPAN_ID}-01", TRACEPARENT * 100, "\u00e9"):
                first, second = await ask(client, "/v1/chat/completions", traceparent=traceparent)
                assert first.parent is None
                assert first.context.trace_id != second.context.trace_id
            both = await ask(client, "/v1/completions")
            assert {span.parent for span in both} == {None}  # the previous context is gone

    run(check())


def test_the_span_of_the_http_request_is_the_parent_of_generation_spans(
    spans: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = spans

    async def check() -> None:
        app = served(Tracing("tiny", provider), tracer_provider=provider, operation_spans=False)
        async with client_of(app) as client, client.post("/v1/messages", headers={"traceparent": TRACEPARENT}):
            pass

    run(check())
    one, other, request = exporter.get_finished_spans()
    assert request.name == "POST /v1/messages"
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == SPAN_ID
    assert one.parent is not None
    assert one.parent.span_id == request.context.span_id
    assert one.parent == other.parent


def test_without_the_library_traces_are_refused_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"traces need OpenTelemetry .* pip install opentelemetry-sdk "):
        exporting_provider()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "inflight"),
        ({"OTEL_SERVICE_NAME": "stories"}, "stories"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=tales,zone=3"}, "tales"),
    ],
)
def test_the_service_name_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    endpoints = []

    class Exporter(InMemorySpanExporter):
        def __init__(self, endpoint: str | None) -> None:
            super().__init__()
            endpoints.append(endpoint)

    module = ModuleType("trace_exporter")
    module.OTLPSpanExporter = Exporter  # type: ignore[attr-defined]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(tracing_module, "import_module", lambda _: module)
    provider = exporting_provider("http://127.0.0.1:4318/v1/traces")
    provider.shutdown()
    assert endpoints == ["http://127.0.0.1:4318/v1/traces"]
    assert provider.resource.attributes["service.name"] == name
    assert provider.resource.attributes["telemetry.sdk.language"] == "python"


def test_a_collector_receives_the_spans() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies = asyncio.Queue[bytes]()

    async def collect(request: Request) -> Response:
        bodies.put_nowait(await request.body())
        return Response()

    async def check() -> None:
        collector = FastAPI()
        collector.add_api_route("/v1/traces", collect, methods=["POST"])
        async with serving(collector) as url:
            provider = exporting_provider(f"{url}/v1/traces")
            tracing = Tracing("tiny", provider)
            tracing.started("a", 1, SamplingParams())
            tracing.finished("a", output_of(), "stop")
            await asyncio.to_thread(provider.shutdown)
            body = await bodies.get()
        for text in (b"text_completion tiny", b"service.name", b"inflight", b"gen_ai.usage.output_tokens"):
            assert text in body

    run(check())
