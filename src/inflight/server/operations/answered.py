"""With which status an HTTP request was answered, for those who only watch: the access log, the metrics."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLIENT_LEFT = 499
"""The status if the client left before it had an answer (it never saw one; the number is nginx's)."""


async def run_watched(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, answered: Callable[[int], None]
) -> None:
    """Run an application for one request; `answered` is called with the status at its end, however that comes."""
    status = CLIENT_LEFT

    async def send_watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, send_watched)
    except Exception:
        status = 500 if status == CLIENT_LEFT else status
        raise
    finally:
        answered(status)
