"""`Together`: several collectors of metrics as one."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Together(Collector):
    """What several collectors have; metrics of the same name, with other labels, are one."""

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
