"""How the middlewares of this package say no, in the envelope that the client expects, and which paths are operators'.

Knows no reason to refuse anything.
"""

import json
from collections.abc import Iterable

from starlette.types import Scope, Send

HEALTH_PATH = "/health"
OPERATOR_PATHS = frozenset({HEALTH_PATH, "/metrics", "/version"})
"""Asked by probes and scrapers: open to all, not limited, not worth a line in the log."""

Header = tuple[bytes, bytes]


def path_of(scope: Scope) -> str:
    """The path as the application routes it: without the prefix that a proxy in front of it has taken for its own."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name (in lower case), if there is one."""
    return next((value for given, value in scope["headers"] if given == name), None)


def error_body(path: str, message: str, kind: str, code: str) -> bytes:
    """An error as JSON: in Anthropic's envelope on its paths, else in OpenAI's."""
    if path.startswith("/v1/messages"):
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


async def refuse(
    scope: Scope, send: Send, status: int, message: str, kind: str, code: str, headers: Iterable[Header] = ()
) -> None:
    """Answer a request with an error and nothing else.

    Args:
        kind: the error's `type`, for both of the envelopes.
        code: the error's `code`, which only OpenAI's has.
        headers: beside type and length of the content.
    """
    await start_answer(send, status, body := error_body(path_of(scope), message, kind, code), headers)
    await send({"type": "http.response.body", "body": body})


async def start_answer(send: Send, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
    """Send the head of an answer in JSON; the body is still to be sent."""
    described = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
