"""Traces for OpenTelemetry: one span per prompt, a child of the client's span if the client sent one.

Spans have the GenAI semantic conventions' attributes, and no text. The library is imported only for traces; its SDK and
exporter are an extra. (A span for the HTTP request, in between, is left to FastAPI's instrumentation, given the same
provider.)
"""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from inflight import __version__
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.endpoints import operation_of
from inflight.server.operations.middleware import Middleware, header_of
from inflight.server.serving.observer import EndReason, RequestObserver
from inflight.server.wire.api_errors import path_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

OPERATION = "inflight.operation"
"""The key in an HTTP request's OpenTelemetry context under which the conventions' operation name is stored."""


def exporting_provider(endpoint: str | None = None) -> "TracerProvider":
    """Return a provider that sends spans to a collector, by OTLP over HTTP, from its own thread.

    Args:
        endpoint: the collector's URL for traces, such as "http://127.0.0.1:4318/v1/traces"; None: taken from
            OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and others).

    Raises:
        ValueError: OpenTelemetry, or its exporter, is not installed.
    """
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ValueError(
            "traces need OpenTelemetry with its OTLP exporter: pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http ({error})"
        ) from error
    own = Resource.create({SERVICE_NAME: "inflight", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))  # OpenTelemetry's variables win
    provider.add_span_processor(BatchSpanProcessor(exporters.OTLPSpanExporter(endpoint)))
    return provider


class Tracing(Middleware, RequestObserver):
    """Makes the spans: an observer of requests, and a middleware that finds their parent spans.

    Args:
        model_name: the name under which clients ask for the model.
        provider: where spans go. The caller owns it and shuts it down (`provider.shutdown()`) at the end, which sends
            the remaining spans and may take some seconds.
    """

    def __init__(self, model_name: str, provider: "TracerProvider") -> None:
        from opentelemetry import context as contexts
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._tracer = provider.get_tracer("inflight", __version__)
        self._contexts, self._kind, self._error = contexts, SpanKind.SERVER, StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, tuple[Span, str]] = {}
        self._waiting: dict[str, tuple[Span, float]] = {}

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        """Start the span of a request about to be sent to the engine."""
        operation = str(self._contexts.get_value(OPERATION) or "text_completion")
        span = self._tracer.start_span(
            f"{operation} {adapter or self._model_name}",
            kind=self._kind,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "inflight",
                "gen_ai.request.model": adapter or self._model_name,
                "gen_ai.response.id": request_id,
                **_request_attributes(num_sequences, params),
            },
        )
        self._waiting[request_id] = (span, time.monotonic())
        self._spans[request_id] = (span, adapter or self._model_name)

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """Record when the first tokens arrived."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            span, start = waiting
            span.set_attribute("gen_ai.response.time_to_first_chunk", now - start)

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """End the span of a request that has ended or was refused."""
        self._waiting.pop(request_id, None)
        span, model = self._spans.pop(request_id, (None, ""))
        if span is None:
            return
        if output is not None:
            span.set_attributes(_response_attributes(output, model))
        if reason not in ("stop", "length"):
            span.set_attribute("error.type", reason)
            span.set_status(self._error, output.error if output is not None else None)
        span.end()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        names = (b"traceparent", b"tracestate")
        carrier = {name.decode(): value.decode("latin-1") for name in names if (value := header_of(scope, name))}
        operation = operation_of(path_of(scope))
        context = self._contexts.set_value(OPERATION, operation, self._propagator.extract(carrier))
        token = self._contexts.attach(context)
        try:
            await app(scope, receive, send)
        finally:
            self._contexts.detach(token)


def _request_attributes(num_sequences: int, params: SamplingParams) -> dict[str, Any]:
    given = {
        "gen_ai.request.choice.count": num_sequences if num_sequences > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.stop_sequences": params.stop_strings or None,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _response_attributes(output: RequestOutput, model_name: str) -> dict[str, Any]:
    times = output.metrics
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in output.outputs],
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(len(each.token_ids) for each in output.outputs),
        "gen_ai.usage.cache_read.input_tokens": times.num_cached_tokens,
    }
    if times.first_scheduled_time is not None:
        # The conventions have no name for it; this is vLLM's.
        attributes["gen_ai.latency.time_in_queue"] = times.first_scheduled_time - times.arrival_time
    return attributes
