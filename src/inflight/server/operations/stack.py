"""`Operations`: wraps an application in all of this package, in the right order.

From the outside in: request ids first, because everything after them logs; then the observers (traces, log, metrics),
so that they see refusals; then CORS, because browsers send preflight requests without a key, and show pages only
refusals with CORS headers; then the drain; then API keys; then limits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from inflight.server.operations.access_log import AccessLog
from inflight.server.operations.api_keys import ApiKeys, read_api_keys
from inflight.server.operations.engine_metrics import ReadStats
from inflight.server.operations.lifecycle import Drain
from inflight.server.operations.limits import BodyLimit, ConcurrencyLimit
from inflight.server.operations.metrics import Metrics
from inflight.server.operations.middleware import Middleware, RequestIds, RootPath
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.tracing import Tracing, exporting_provider
from inflight.server.serving.observer import Observers, RequestObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("inflight.server")


class OperationsStack:
    """The operations around one server.

    Args:
        metrics: counts the server's answers.
        abort_all: ends all running requests; see `Drain`.
        environment_keys: more API keys from an environment variable, separated by commas.

    Attributes:
        drain: for `DrainingServer`.
        access_log: must be one of the server's observers.

    Raises:
        ValueError: the API keys are invalid, or traces are requested without their library.
    """

    def __init__(
        self,
        settings: OperatorSettings,
        metrics: Middleware,
        abort_all: Callable[[], Awaitable[None]] | None = None,
        environment_keys: str | None = None,
    ) -> None:
        self.drain = Drain(settings.grace_period, abort_all)
        self.access_log = AccessLog(with_text=settings.log_text)
        self._settings, self._around = settings, metrics
        self.timeout_keep_alive = settings.timeout_keep_alive
        file = None if settings.api_key_file is None else Path(settings.api_key_file)
        self._read_keys = partial(read_api_keys, settings.api_keys, file, environment_keys)
        keys = self._read_keys()
        self._api_keys = ApiKeys(keys) if keys else None
        self._provider: TracerProvider | None = None
        self._tracing: Tracing | None = None
        if settings.traces_endpoint is not None:
            self._provider = exporting_provider(settings.traces_endpoint)

    def traces(self, model_name: str) -> list[RequestObserver]:
        """The observers that trace a model's requests; none if traces are off."""
        if self._provider is None:
            return []
        self._tracing = Tracing(model_name, self._provider)  # as a middleware, any will do
        return [self._tracing]

    def surround(self, app: ASGIApp) -> ASGIApp:
        """Return the application with all operations around it."""
        settings = self._settings
        app = BodyLimit(settings.max_body_size).middleware(app)
        if settings.max_requests is not None:
            app = ConcurrencyLimit(settings.max_requests).middleware(app)
        if self._api_keys is not None:
            app = self._api_keys.middleware(app)
        app = self.drain.middleware(app)
        if settings.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        app = self.access_log.middleware(self._around.middleware(app))
        if self._tracing is not None:
            app = self._tracing.middleware(app)
        app = RequestIds().middleware(app)
        return RootPath(settings.root_path).middleware(app) if settings.root_path else app

    def reload(self) -> None:
        """Reread the API keys. On failure the old ones stay. Does not raise."""
        if self._api_keys is None:
            logger.warning("asked to reread the API keys, but this server runs without any")
            return
        try:
            keys = self._read_keys()
            self._api_keys.replace(keys)
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys are valid now", len(keys))

    async def close(self) -> None:
        """Send the remaining traces. Await it when the server has ended."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)


class Operations(OperationsStack, Observers):
    """The operations around a server of one model. Must be registered as the observer of the server's requests.

    Args:
        model_name: the model's name in metrics and traces.
        read_stats: asks the engines, as `AsyncLLM.replica_stats` does.
        count_crashes: see `Metrics`.
        observers: further observers of the server's requests.
        abort_all, environment_keys: see `OperationsStack`.

    Attributes:
        metrics: its `endpoint` must answer `/metrics`.
    """

    def __init__(
        self,
        settings: OperatorSettings,
        model_name: str,
        read_stats: ReadStats,
        abort_all: Callable[[], Awaitable[None]] | None = None,
        environment_keys: str | None = None,
        count_crashes: Callable[[], int] = lambda: 0,
        observers: Iterable[RequestObserver] = (),
    ) -> None:
        self.metrics = Metrics(model_name, read_stats, count_crashes)
        OperationsStack.__init__(self, settings, self.metrics, abort_all, environment_keys)
        Observers.__init__(self, [self.access_log, self.metrics, *observers, *self.traces(model_name)])
