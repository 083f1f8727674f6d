"""`ForwardedRequest`: an HTTP request as plain data, forwarded between deployments of Ray Serve.

Its `prompt`, the beginning of the request's prompt, is for Serve's router.
"""

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from inflight.batches.request_lines import prompt_of

HANDED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request whose body has arrived.

    Attributes:
        scope: what ASGI says of it, as far as it is plain data.
        prompt: compared by Serve's prefix-affinity router; never empty: requests without a prompt have their path.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str

    @classmethod
    async def receive(cls, scope: Scope, receive: Receive) -> "ForwardedRequest | None":
        """The request; None if its client disconnected early."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                plain = {name: scope[name] for name in HANDED_ON if name in scope}
                return cls(plain, bytes(body), prompt_of(bytes(body)).decode(errors="replace") or scope["path"])
        return None
