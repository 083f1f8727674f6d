"""`run_watched`: reports the status of each HTTP answer to the access log and the metrics."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.server.wire.api_errors import CLIENT_CLOSED_REQUEST

MODEL = "model"
"""The key in a request's state for the name of the model that it was handed to, where there are several."""


def model_of(scope: Scope) -> str | None:
    """Return the name of that model; None: there is one only, or the request came to none."""
    name: str | None = scope.get("state", {}).get(MODEL)
    return name


async def run_watched(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, answered: Callable[[int], None]
) -> None:
    """Run an application for one request and call `answered` with the status at its end, however it ends."""
    status = CLIENT_CLOSED_REQUEST

    async def send_watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, send_watched)
    except Exception:
        status = 500 if status == CLIENT_CLOSED_REQUEST else status
        raise
    finally:
        answered(status)
