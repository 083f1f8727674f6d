"""Errors in Anthropic's envelope. Decides which error type each status gets; `api_errors` decides the message."""

import json
from collections.abc import Mapping

from fastapi import Request
from starlette.responses import Response

from inflight.server.wire.api_errors import ApiError

PATH = "/v1/messages"
"""Errors use this envelope on paths with this prefix."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_TOO_LONG = "prompt is too long"
"""Anthropic's envelope has no code for it: clients look for these words in the message (Claude Code does, to compact
its chat)."""


def envelope(error: ApiError, request: Request) -> bytes:
    """Return the answer's body, in ASCII because it quotes what the client sent."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    request_id = request.scope.get("state", {}).get("request_id")
    message = f"{_TOO_LONG}: {error}" if error.code == "context_length_exceeded" else str(error)
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return json.dumps(body).encode()


def answer(error: ApiError, request: Request) -> Response:
    """Return the error as a whole answer."""
    return Response(envelope(error, request), error.status, error.headers, media_type="application/json")


def event(error: ApiError, request: Request) -> bytes:
    """Return the error as the last event of a stream."""
    return b"event: error\ndata: " + envelope(error, request) + b"\n\n"
