"""`EngineReplica`: a Ray Serve replica: an engine with the whole OpenAI application.

Serve polls its health and load, and drains it before ending it.

Autoscaling of a Ray Serve deployment: an `AutoscalingConfig.policy`, and the statistics that replicas report.

It defines a full engine. Serve's configuration has delays, factors and bounds.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from inflight.contracts.step.record import EngineStats
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.scale.prefix_front import ForwardedRequest
from inflight.scale.settings import AppSettings, options_in_actor
from inflight.server.app import create_app
from inflight.server.batches.answering import answered
from inflight.server.operations.settings import KEYS_VARIABLE
from inflight.server.operations.stack import Operations

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


TARGET_LOAD = 0.8
"""The target load of engines, with room for bursts until another engine is loaded."""

POLICY = f"{__name__}:replicas_wanted"


def reported(stats: EngineStats, max_num_seqs: int) -> dict[str, float]:
    """A replica's report (`record_autoscaling_stats`).

    `slots` is how many sequences the engine holds: `max_num_seqs`, or as many as there is room for in its cache, if all
    are as long as those that run. `load` is how often its sequences, running and waiting, would fill it.
    """
    num_blocks = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
    slots = float(max_num_seqs)
    if stats.num_blocks_used:
        slots = min(slots, max(1.0, stats.num_running * num_blocks / stats.num_blocks_used))
    return {"load": (stats.num_running + stats.num_waiting) / slots, "slots": slots}


def replicas_wanted(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """The target number of replicas for their load and the queued requests.

    A replica that has not reported counts as the others do, since it may be too busy. Until one has reported, the
    number stays.
    """
    metrics = context.aggregated_metrics or {}
    loads, slots = metrics.get("load", {}), metrics.get("slots", {})
    if not loads or not slots:
        return context.target_num_replicas, {}
    mean_slots = sum(slots.values()) / len(slots)
    mean_load = sum(loads.values()) / len(loads)
    load = mean_load * len(context.running_replicas) + context.total_queued_requests / mean_slots
    return load / TARGET_LOAD, {}


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
