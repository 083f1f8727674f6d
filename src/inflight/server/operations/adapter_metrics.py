"""`AdapterMetrics`: which adapters requests have, as vLLM tells gateways that send requests where an adapter is."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class AdapterMetrics(Collector):
    """One gauge: names in its labels, separated by commas; its value is the time, by which the newest is found.

    Args:
        most: how many adapters can run at once.
        in_use: the adapter of each request that has one, and whether it runs (or else waits).
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
