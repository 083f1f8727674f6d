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
    """

    def __init__(self, most: int, in_use: Callable[[], Iterable[tuple[str, bool]]]) -> None:
        self._most, self._in_use = most, in_use

    def collect(self) -> Iterator[Metric]:
        in_use = sorted(set(self._in_use()))
        running, waiting = (",".join(name for name, runs in in_use if runs is wanted) for wanted in (True, False))
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that requests have.", labels=labels)
        family.add_metric([str(self._most), running, waiting], time.time())
        yield family
