"""`PrefixFront`: reads requests before Ray Serve routes them, so that common prefixes go to the same replica.

Serve's proxies choose a replica before reading a request. This deployment reads it and forwards it through Serve's own
prefix-affinity router.

`ForwardedRequest`: an HTTP request as plain data, forwarded between deployments of Ray Serve.

Its `prompt`, the beginning of the request's prompt, is for Serve's router.
"""

from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.batches.request_lines import prompt_of
from inflight.server.operations.limits import BodyLimit

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


ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"


def router_of(max_num_seqs: int) -> dict[str, Any]:
    """Serve's `request_router_config`: by prefix, unless loads differ by half of an engine's slots."""
    return {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"imbalanced_threshold": max(1, max_num_seqs // 2), "do_eviction": True},
    }


class PrefixFront:
    """Forwards requests to replicas.

    Args:
        replicas: the deployment of `EngineReplica`.
        max_body_size: bytes.
    """

    def __init__(self, replicas: DeploymentHandle[Any], max_body_size: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_size = max_body_size

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, for `serve.ingress`."""
        limited = BodyLimit(self._max_body_size).middleware(self._hand_on)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                for event in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{event}.complete"})
            elif scope["type"] == "http":
                await limited(scope, receive, send)

        return app

    async def _hand_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await ForwardedRequest.receive(scope, receive)
        if request is None:
            return
        answer: Any = self._replicas.remote(request)  # as a stream; its type does not say that
        try:
            async for messages in answer:
                for message in messages:
                    await send(message)
        finally:
            answer.cancel()
