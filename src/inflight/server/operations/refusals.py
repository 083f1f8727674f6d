"""How this package's middlewares refuse a request, in the envelope that its client expects.

Does not know why requests are refused.
"""

import json
from collections.abc import Iterable

from starlette.types import Scope, Send

from inflight.server.operations.paths import path_of

Header = tuple[bytes, bytes]


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with that name (in lower case), if there is one."""
    return next((value for given, value in scope["headers"] if given == name), None)


def error_body(path: str, message: str, kind: str, code: str) -> bytes:
    """Return an error as JSON: in Anthropic's envelope on its paths, else in OpenAI's."""
    if path.startswith("/v1/messages"):
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


async def refuse(
    scope: Scope, send: Send, status: int, message: str, kind: str, code: str, headers: Iterable[Header] = ()
) -> None:
    """Answer a request with an error.

    Args:
        kind: the error's `type`, for both envelopes.
        code: the error's `code`, which only OpenAI's envelope has.
        headers: headers besides the content's type and length.
    """
    await start_answer(send, status, body := error_body(path_of(scope), message, kind, code), headers)
    await send({"type": "http.response.body", "body": body})


async def start_answer(send: Send, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
    """Send the head of a JSON answer, without the body."""
    described = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
