"""The list of all endpoints, used by applications, routing to models, refusals, limits, traces and batch jobs.

A new endpoint is a handler in a subpackage and a row here.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from inflight.server.anthropic import endpoint as anthropic
from inflight.server.batches import batches_endpoint, files_endpoint
from inflight.server.openai import adapters, chat, completions, tokenization
from inflight.server.openai.transcriptions import FORM, transcribe
from inflight.server.pooling import embeddings, scores
from inflight.server.responses import conversations
from inflight.server.responses import endpoint as responses
from inflight.server.responses.answer import ResponsesErrors
from inflight.server.serving import status
from inflight.server.wire.api_errors import OPENAI_ERRORS, ErrorEnvelope


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint.

    Attributes:
        handler: the handler; the annotation of its parameter `body` is the request model.
        methods: HTTP methods.
        aliases: further paths, left out of the OpenAPI document.
        errors: the envelope of its errors.
        is_batch_line: whether lines of batch files may use it.
        operation: its operation name in traces (OpenTelemetry's semantic conventions); None: "chat".
        answered_by: with several models: "model": the application of the requested one; "server": the server itself;
            "single model": not available.
        is_for_operators: whether it is for probes and scrapers: it needs no key, has no limits, and is logged at debug
            level only.
        streams_body: whether the handler streams the body, with its own limit.
        openapi: additions to the OpenAPI document.
    """

    path: str
    handler: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...] = ("POST",)
    aliases: tuple[str, ...] = ()
    errors: ErrorEnvelope = OPENAI_ERRORS
    is_batch_line: bool = False
    operation: str | None = None
    answered_by: Literal["model", "server", "single model"] = "model"
    is_for_operators: bool = False
    streams_body: bool = False
    openapi: Mapping[str, Any] | None = None


ANTHROPIC_ERRORS, RESPONSES_ERRORS = anthropic.AnthropicErrors(), ResponsesErrors()
GET, PROBE = ("GET",), ("GET", "HEAD")
HEALTH_PATH = "/health"

ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat.chat_completions, operation="chat", is_batch_line=True),
    Endpoint("/v1/completions", completions.completions, operation="text_completion", is_batch_line=True),
    Endpoint("/v1/responses", responses.create_response, operation="chat", is_batch_line=True, errors=RESPONSES_ERRORS),
    Endpoint("/v1/embeddings", embeddings.embeddings, operation="embeddings", is_batch_line=True),
    Endpoint("/v1/messages", anthropic.messages, operation="chat", errors=ANTHROPIC_ERRORS),
    Endpoint("/v1/messages/count_tokens", anthropic.count_tokens, errors=ANTHROPIC_ERRORS),
    Endpoint("/pooling", embeddings.pooling),
    Endpoint("/v1/rerank", scores.rerank, aliases=("/rerank", "/v2/rerank")),
    Endpoint("/v1/score", scores.score, aliases=("/score",)),
    Endpoint("/classify", embeddings.classify),
    Endpoint("/tokenize", tokenization.tokenize),
    Endpoint("/detokenize", tokenization.detokenize),
    Endpoint("/tokenizer_info", tokenization.tokenizer_info, GET),
    Endpoint("/v1/responses/compact", responses.compact_response, operation="chat", errors=RESPONSES_ERRORS),
    Endpoint("/v1/responses/{response_id}", responses.get_response, GET, answered_by="server"),
    Endpoint("/v1/responses/{response_id}/cancel", responses.cancel_response, answered_by="server"),
    Endpoint("/v1/responses/{response_id}", responses.delete_response, ("DELETE",), answered_by="server"),
    Endpoint("/v1/conversations", conversations.create, answered_by="server"),
    Endpoint("/v1/conversations/{conversation_id}", conversations.retrieve, GET, answered_by="server"),
    Endpoint("/v1/conversations/{conversation_id}", conversations.delete, ("DELETE",), answered_by="server"),
    Endpoint("/v1/conversations/{conversation_id}/items", conversations.add_items, answered_by="server"),
    Endpoint("/v1/conversations/{conversation_id}/items", conversations.list_items, GET, answered_by="server"),
    Endpoint("/v1/audio/transcriptions", transcribe, answered_by="single model", openapi=FORM),
    Endpoint("/v1/load_lora_adapter", adapters.load_adapter, answered_by="single model"),
    Endpoint("/v1/unload_lora_adapter", adapters.unload_adapter, answered_by="single model"),
    Endpoint(
        "/v1/files", files_endpoint.upload, answered_by="server", streams_body=True, openapi=files_endpoint.UPLOAD
    ),
    Endpoint("/v1/files", files_endpoint.list_files, GET, answered_by="server"),
    Endpoint("/v1/files/{file_id}", files_endpoint.retrieve, GET, answered_by="server"),
    Endpoint("/v1/files/{file_id}", files_endpoint.delete, ("DELETE",), answered_by="server"),
    Endpoint("/v1/files/{file_id}/content", files_endpoint.content, GET, answered_by="server"),
    Endpoint("/v1/batches", batches_endpoint.create, answered_by="server"),
    Endpoint("/v1/batches", batches_endpoint.list_batches, GET, answered_by="server"),
    Endpoint("/v1/batches/{batch_id}", batches_endpoint.retrieve, GET, answered_by="server"),
    Endpoint("/v1/batches/{batch_id}/cancel", batches_endpoint.cancel, answered_by="server"),
    Endpoint("/v1/models", status.models, GET, answered_by="server"),
    Endpoint("/v1/models/{name:path}", status.model, GET, answered_by="server"),
    Endpoint(HEALTH_PATH, status.health, PROBE, answered_by="server", is_for_operators=True),
    Endpoint("/version", status.version, PROBE, answered_by="server", is_for_operators=True),
    Endpoint("/metrics", status.metrics, PROBE, answered_by="server", is_for_operators=True),
)

BATCH_LINES = tuple(each.path for each in ENDPOINTS if each.is_batch_line)
"""The paths that lines of batch files may name."""

OPERATOR_PATHS = frozenset(each.path for each in ENDPOINTS if each.is_for_operators)
STREAMED_PATHS = frozenset(each.path for each in ENDPOINTS if each.streams_body)

PAGE_PATHS = ("/", "/docs")
PAGE_FILES = "/ui"
"""The live page itself: static files."""

LIVE_PATHS = "/live"
"""The live page's data: it needs a key like any request, and is neither limited nor logged, since the page polls."""


def add_endpoints(app: FastAPI, route_of: Callable[[Endpoint], type[APIRoute] | None]) -> None:
    """Add all endpoints for which there is a route class to an application."""
    for each in ENDPOINTS:
        if (kind := route_of(each)) is None:
            continue
        for path in (each.path, *each.aliases):
            for method in each.methods:
                app.router.add_api_route(
                    path,
                    each.handler,
                    methods=[method],
                    include_in_schema=path == each.path and method != "HEAD",
                    openapi_extra=dict(each.openapi or {}) or None,
                    route_class_override=kind,
                )


def errors_of_path(path: str) -> ErrorEnvelope:
    """The error envelope of a path, known or not."""
    own = (each.errors for each in ENDPOINTS if each.errors is not OPENAI_ERRORS and path.startswith(each.path))
    return next(own, OPENAI_ERRORS)


def operation_of(path: str) -> str:
    """The operation name of a path in traces."""
    return next((each.operation for each in ENDPOINTS if each.path == path and each.operation), "chat")


def needs_no_key(path: str) -> bool:
    """Whether a request to this path needs no API key."""
    return path in OPERATOR_PATHS or path in PAGE_PATHS or path.startswith(f"{PAGE_FILES}/")


def is_work(path: str) -> bool:
    """Whether requests to this path are work: limited and logged."""
    return not needs_no_key(path) and not path.startswith(f"{LIVE_PATHS}/")
