"""Metrics for Prometheus, under vLLM's names where it has them, so that its dashboards work for this server, too.

Engines' counters (`engine_metrics`) are read at each scrape; the server's own (latencies, ends of requests, answers)
are counted in `started`, `produced` and `finished`, which run for every step of every request and so must be cheap.

Small collectors of metrics: adapters, in vLLM's format for gateways; batch jobs; several collectors as one.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.batches.batch import Batch
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.endpoints import OPERATOR_PATHS
from inflight.server.operations.engine_metrics import EngineMetrics, ReadStats
from inflight.server.operations.middleware import Middleware, run_watched
from inflight.server.serving.observer import EndReason, RequestObserver
from inflight.server.wire.api_errors import path_of


class MergedCollector(Collector):
    """Merges collectors, joining metrics of the same name."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = list(collectors)

    def collect(self) -> Iterator[Metric]:
        of_name: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                of_name.setdefault(metric.name, _empty(metric)).samples += metric.samples
        yield from of_name.values()


def _empty(metric: Metric) -> Metric:
    """A metric of the same name, kind and description."""
    return Metric(metric.name, metric.documentation, metric.type, metric.unit)


class AdapterMetrics(Collector):
    """One gauge: names in its labels, separated by commas; its value is the time, by which the newest is found.

    Args:
        most: how many adapters can run at once.
        in_use: the adapter of each request that has one, and whether it runs or waits.
        model_name: of the model, where there are several; None: there is no such label, as vLLM has none.
    """

    def __init__(
        self, most: int, in_use: Callable[[], Iterable[tuple[str, bool]]], model_name: str | None = None
    ) -> None:
        self._most, self._in_use, self._model_name = most, in_use, model_name

    def collect(self) -> Iterator[Metric]:
        in_use = sorted(set(self._in_use()))
        running, waiting = (",".join(name for name, runs in in_use if runs is wanted) for wanted in (True, False))
        labels = {"max_lora": str(self._most), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        if self._model_name is not None:
            labels["model_name"] = self._model_name
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that requests have.", labels=list(labels))
        family.add_metric(list(labels.values()), time.time())
        yield family


class BatchMetrics:
    """Counts the requests of batch jobs as they are answered: those of this process, not of those before it.

    Args:
        model_name: the metrics' `model_name` label.
        registry: which they are in.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        answered = Counter(
            "inflight:batch_requests",
            "Answered requests of batch jobs, by outcome: completed or failed.",
            ["model_name", "outcome"],
            registry=registry,
        )
        self._completed, self._failed = (answered.labels(model_name, each) for each in ("completed", "failed"))
        left = Gauge(
            "inflight:batch_requests_left",
            "Requests of batch jobs in work that are not answered.",
            ["model_name"],
            registry=registry,
        )
        self._left = left.labels(model_name)
        self._seen: dict[str, Batch] = {}  # jobs in work

    def update(self, batch: Batch) -> None:
        """A job has changed."""
        before = self._seen.pop(batch.id, batch)
        if not batch.is_finished:
            self._seen[batch.id] = batch
        if batch.status == "in_progress":  # requests cancelled at its end were not answered
            self._completed.inc(batch.num_completed - before.num_completed)
            self._failed.inc(batch.num_failed - before.num_failed)
        in_work = (each for each in self._seen.values() if each.status == "in_progress")
        self._left.set(sum(each.num_lines - each.num_completed - each.num_failed for each in in_work))


SECONDS_FOR_ENGINE = 1.0
"""Seconds that a scrape waits for the engine, which answers between two steps."""

PROCESS = ProcessCollector(registry=None)
"""Metrics of this process."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

# vLLM's buckets; the first two also have smaller ones, for small models.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
PREEMPTIONS_BUCKETS = (0, 1, 2, 5, 10, 20)
SEQUENCES_BUCKETS = (1, 2, 5, 10, 20)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's start to its first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("From one token of a sequence to the next.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("From one token to the next, a request's mean.", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From a request's start to its end.", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("From its first step to its first token.", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From its first token to its last.", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("From its first step to its last token.", REQUEST_BUCKETS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens that a request generated.", COUNT_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest sequence.", COUNT_BUCKETS),
    "request_params_max_tokens": ("`max_tokens` of requests that set it.", COUNT_BUCKETS),
    "request_num_preemptions": ("Preemptions of a request's sequences.", PREEMPTIONS_BUCKETS),
    "request_params_n": ("`n` of requests.", SEQUENCES_BUCKETS),
}
"""What is observed of requests, by its name without "vllm:": what it says, and its buckets."""
INTER_TOKEN = "inter_token_latency_seconds"
OLDER_NAMES = {INTER_TOKEN: "vllm:time_per_output_token_seconds"}


@dataclass(slots=True)
class _Running:
    """A request that has not finished: when it started, and when its latest tokens were counted (0: no tokens yet)."""

    start: float
    num_sequences: int
    params: SamplingParams
    adapter: str | None = None
    last: float = 0.0
    num_pending: int = 0


class Metrics(Middleware, RequestObserver):
    """All metrics of one model, in a registry of their own; an observer of its requests.

    Args:
        model_name: the metrics' `model_name` label.
        read_stats: queries the engines, as `AsyncLLM.replica_stats` does.
        count_crashes: returns the number of crashes, known even without a running engine.

    Attributes:
        engines: the engines' counters.
        registry: the registry of all metrics.
    """

    def __init__(
        self,
        model_name: str,
        read_stats: ReadStats,
        count_crashes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model_name = model_name
        self._read_stats = read_stats
        self._count_crashes = count_crashes
        self._scraping = asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self.registry = CollectorRegistry()
        self.engines = EngineMetrics(model_name, self.registry)
        self._histograms = {name: self._histogram(name, *how) for name, how in HISTOGRAMS.items()}
        ends = self._counters("vllm:request_success", "Finished requests, by how they ended.", "finished_reason")
        self._ends = {each: ends.labels(model_name, each) for each in ("stop", "length", "abort", "error")}
        self._aborts = self._counters("inflight:request_aborts", "Requests that ended early, by reason.", "reason")
        self._http_requests = http_requests(self.registry)
        self._batches = BatchMetrics(model_name, self.registry)

    def describe_adapters(self, most: int, *, of_several_models: bool = False) -> None:
        """Report which adapters requests have; `most` can run at once. Call it where there may be any."""
        model_name = self._model_name if of_several_models else None
        self.registry.register(AdapterMetrics(most, self._adapters, model_name))

    def _adapters(self) -> Iterator[tuple[str, bool]]:
        """The adapter of each request that has one, and whether its first token has arrived."""
        for each in tuple(self._running.values()):
            if each.adapter is not None:
                yield each.adapter, bool(each.last)

    # ------------------------------------------------------------------------------------- requests

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        """Record a request that is about to go to the engine."""
        self._running[request_id] = _Running(time.monotonic(), num_sequences, params, adapter)

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """Count new tokens of a request's sequences, whether they arrive in one call or in one call per sequence.

        The time since the previous tokens is divided equally among tokens that arrive together."""
        running = self._running.get(request_id)
        if running is None or not num_new_tokens:
            return
        if not running.last:
            running.last = now
            self._observe(time_to_first_token_seconds=now - running.start)
            return
        running.num_pending += num_new_tokens
        num_each = running.num_pending // running.num_sequences
        if num_each:
            gap = (now - running.last) / num_each
            for _ in range(num_each):
                self._histograms[INTER_TOKEN].observe(gap)
            running.last = now
            running.num_pending -= num_each * running.num_sequences

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """Record the end of a request, or its refusal."""
        running = self._running.pop(request_id, None)
        if running is None and reason != "refused":
            return
        if reason not in ("stop", "length"):
            self._aborts.labels(self._model_name, reason).inc()
        if running is None or reason == "refused":
            return
        self._ends[reason if reason in self._ends else "abort"].inc()
        latency = time.monotonic() - running.start
        self._observe(e2e_request_latency_seconds=latency, request_params_n=running.num_sequences)
        if running.params.max_tokens is not None:
            self._observe(request_params_max_tokens=running.params.max_tokens)
        if output is not None:
            self._observe_output(output)

    def batch_changed(self, batch: Batch) -> None:
        """Count answered requests of a batch job."""
        self._batches.update(batch)

    def _observe_output(self, output: RequestOutput) -> None:
        lengths, times = [len(each.token_ids) for each in output.outputs], output.metrics
        self._observe(
            request_prompt_tokens=len(output.prompt_token_ids),
            request_generation_tokens=sum(lengths),
            request_max_num_generation_tokens=max(lengths),
            request_num_preemptions=times.num_preemptions,
        )
        if times.first_scheduled_time is None:
            return
        self._observe(request_queue_time_seconds=times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None or times.last_token_time is None:
            return
        decode_time = times.last_token_time - times.first_token_time
        self._observe(
            request_prefill_time_seconds=times.first_token_time - times.first_scheduled_time,
            request_inference_time_seconds=times.last_token_time - times.first_scheduled_time,
            request_decode_time_seconds=decode_time,
        )
        if max(lengths) > 1:
            self._observe(request_time_per_output_token_seconds=decode_time / (max(lengths) - 1))

    def _observe(self, **values: float) -> None:
        """Observe values of `HISTOGRAMS`."""
        for name, value in values.items():
            self._histograms[name].observe(value)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""

        await run_watched(app, scope, receive, send, partial(self.count_answer, scope))

    def count_answer(self, scope: Scope, status: int) -> None:
        """An HTTP request was answered."""
        self._http_requests.labels(self._model_name, *request_labels(scope), str(status)).inc()

    # ------------------------------------------------------------------------------------- scrapes

    async def endpoint(self, request: Request) -> Response:
        """Answer `/metrics`."""
        return Response(await self.scrape(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def scrape(self) -> bytes:
        """Return all metrics in the text format. If an engine does not answer in time, its gauges keep their values; if
        it does not run, they become 0."""
        await self.update()
        return generate_latest(MergedCollector([PROCESS, self.registry]))

    async def update(self) -> None:
        """Query the engines' counters."""
        async with self._scraping:  # so that the engines' answers are processed in their order
            self.engines.take_in(await self._read_stats(SECONDS_FOR_ENGINE), self._count_crashes())

    # ------------------------------------------------------------------------------------- kinds

    def _counters(self, name: str, what: str, *labels: str) -> Counter:
        """Return one counter for each combination of labels, of which the first is `model_name`."""
        return Counter(name, what, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", what, ["model_name"], registry=self.registry, buckets=buckets)
        if name in OLDER_NAMES:
            self.registry.register(_OlderName(made, OLDER_NAMES[name]))
        return made.labels(self._model_name)


def http_requests(registry: CollectorRegistry) -> Counter:
    """Make the counter of HTTP requests."""
    what = "Answered HTTP requests; path is the route's, status is 499 if the client left before the answer."
    return Counter("inflight:http_requests", what, ["model_name", "method", "path", "status"], registry=registry)


def request_labels(scope: Scope) -> tuple[str, str]:
    """Return method and path of a request as labels. Only known methods and routes are some: clients could invent any
    number of others."""
    method = scope["method"] if scope["method"] in METHODS else "other"
    path = path_of(scope)
    return method, getattr(scope.get("route"), "path", path if path in OPERATOR_PATHS else "other")


class _OlderName(Collector):
    """A copy of a histogram, under its former name."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram, self._name = histogram, name

    def collect(self) -> Iterator[Metric]:
        for metric in self._histogram.collect():
            older = Metric(self._name, metric.documentation, metric.type)
            older.samples = [
                sample._replace(name=self._name + sample.name.removeprefix(metric.name)) for sample in metric.samples
            ]
            yield older
