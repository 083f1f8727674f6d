"""Small collectors of metrics: adapters, in vLLM's format for gateways; batch jobs; several collectors as one."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inflight.batches.batch import Batch


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
