"""`EngineReplica`: a Ray Serve replica: an engine with the whole OpenAI application.

Serve polls its health and load, and drains it before ending it.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from inflight.entrypoints.async_llm import AsyncLLM
from inflight.scale.autoscaling import reported
from inflight.scale.prefix_front import ForwardedRequest
from inflight.scale.settings import AppSettings, options_in_actor
from inflight.server.app import create_app
from inflight.server.batches.answering import answered
from inflight.server.operations.settings import KEYS_VARIABLE
from inflight.server.operations.stack import Operations


class EngineReplica:
    """A replica, started once its model is loaded."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings
        options = options_in_actor(settings.engine)
        self._llm = AsyncLLM(settings.model, settings.tokenizer, starts_at_once=True, **options)
        self._loss: Exception | None = None
        await self._llm.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, for `serve.ingress`; its end stops the engine."""
        settings = self._settings.server_settings()
        operations = Operations(
            self._settings.operator_settings(),
            settings.model_name,
            self._llm.replica_stats,
            environment_keys=os.environ.get(KEYS_VARIABLE),
            count_crashes=lambda: self._llm.num_crashes,
        )
        app = operations.surround(create_app(self._llm, settings, operations, self._lose))
        return _closing(_without_request_id(app), operations)

    async def check_health(self) -> None:
        """Called by Serve; raises if this replica is unusable. An engine being restarted after a crash is usable."""
        if self._loss is not None:
            raise self._loss

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve if it scales automatically."""
        stats = await self._llm.stats()
        return reported(stats, self._llm.config.scheduling.max_num_seqs)

    def _lose(self, error: Exception) -> None:
        self._loss = error


class AnsweringReplica(EngineReplica):
    """A replica behind a `PrefixFront`."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._lifespan: LifespanOn | None = None
        await super().__init__(settings)
        self._app = self.__serve_build_asgi_app__()
        self._lifespan = LifespanOn(Config(self._app, lifespan="on", log_config=None))
        await self._lifespan.startup()

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Answer a request; yields the messages of the answer."""
        async with aclosing(answered(self._app, request.scope, request.body)) as answer:
            async for messages in answer:
                yield messages

    async def __del__(self) -> None:
        if self._lifespan is not None:
            await self._lifespan.shutdown()


def _closing(app: ASGIApp, operations: Operations) -> ASGIApp:
    """An application that sends the last traces when it ends."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if scope["type"] == "lifespan":
            await operations.close()

    return handle


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """An application without request ids, which Serve's proxies set."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_rest)

    return handle
