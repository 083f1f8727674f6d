"""`PoolMetrics`: the metrics of all models, each under its name, and counts of loads and unloads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.batches.batch import Batch
from inflight.server.models.load_scheduler import State
from inflight.server.models.loading import ModelLoad, ServedModel
from inflight.server.models.pool import ModelLoader, ModelPool
from inflight.server.operations.metrics import (
    PROCESS,
    BatchMetrics,
    MergedCollector,
    Metrics,
    http_requests,
    request_labels,
)
from inflight.server.operations.middleware import Middleware, model_of, run_watched
from inflight.server.serving.observer import RequestObserver

NO_MODEL = ""
"""The label for requests without a model, and batch jobs."""


class PoolMetrics(Middleware, RequestObserver):
    """Counts answers, as a middleware, and batch jobs, as an observer.

    Attributes:
        by_model: the metrics of each model; each must be an observer of its requests.
    """

    def __init__(self, loads: Mapping[str, ModelLoad]) -> None:
        self._loads = loads
        self.by_model = {name: _metrics(name, load) for name, load in loads.items()}
        self._registry = CollectorRegistry()
        self._http_requests = http_requests(self._registry)
        self._batches = BatchMetrics(NO_MODEL, self._registry)

    def watch(self, pool: ModelPool[ServedModel]) -> None:
        """Report the metrics of a pool."""
        self._registry.register(Loads(pool))

    def counted(self, name: str, load: ModelLoader[ServedModel]) -> ModelLoader[ServedModel]:
        """Wrap a load to count its engines, from start to end."""
        metrics = self.by_model[name]

        @asynccontextmanager
        async def counted_load(lose: Callable[[Exception], None]) -> AsyncIterator[ServedModel]:
            async with load(lose) as model:
                metrics.engines.describe_cache(model.llm.model_info, model.llm.num_replicas)
                try:
                    yield model
                finally:
                    await metrics.update()
                    metrics.engines.forget()

        return counted_load

    def batch_changed(self, batch: Batch) -> None:
        """See `RequestObserver`."""
        self._batches.update(batch)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        await run_watched(app, scope, receive, send, partial(self._count_answer, scope))

    def _count_answer(self, scope: Scope, status: int) -> None:
        name = model_of(scope)
        if name is not None:
            self.by_model[name].count_answer(scope, status)
        else:
            self._http_requests.labels(NO_MODEL, *request_labels(scope), str(status)).inc()

    async def endpoint(self, request: Request) -> Response:
        """Answer `/metrics`."""
        await asyncio.gather(*(self.by_model[name].update() for name, load in self._loads.items() if load.is_running))
        together = MergedCollector([PROCESS, self._registry, *(metrics.registry for metrics in self.by_model.values())])
        return Response(generate_latest(together), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _metrics(name: str, load: ModelLoad) -> Metrics:
    return Metrics(name, load.replica_stats, lambda: load.num_crashes)


class Loads(Collector):
    """A pool's counters."""

    def __init__(self, pool: ModelPool[Any]) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        pool = self._pool
        what = "1 for the state that a model is in, and 0 for the others."
        states = GaugeMetricFamily("inflight:model_state", what, labels=["model_name", "state"])
        for name in pool:
            for state in get_args(State):
                states.add_metric([name, state], float(pool.entry(name).state == state))
        yield states
        for metric, what, counts in (
            ("inflight:model_loads", "How often a model was loaded.", pool.num_loads),
            ("inflight:model_load_failures", "Failed loads of a model.", pool.num_failures),
            ("inflight:model_unloads", "How often a model was unloaded.", pool.num_unloads),
        ):
            family = CounterMetricFamily(metric, what, labels=["model_name"])
            for name, number in counts.items():
                family.add_metric([name], number)
            yield family
        what = "How long a model's last load took."
        seconds = GaugeMetricFamily("inflight:model_load_seconds", what, labels=["model_name"])
        for name, last in pool.load_seconds.items():
            seconds.add_metric([name], last)
        yield seconds
