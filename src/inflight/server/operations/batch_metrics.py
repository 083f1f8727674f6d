"""`BatchMetrics`: what a server's batch jobs have done, and what is left of them, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from inflight.batches.batch import Batch


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

    def observe(self, batch: Batch) -> None:
        """A job has changed."""
        before = self._seen.pop(batch.id, batch)
        if not batch.is_finished:
            self._seen[batch.id] = batch
        if batch.status == "in_progress":  # what is given up at its end was not answered
            self._completed.inc(batch.num_completed - before.num_completed)
            self._failed.inc(batch.num_failed - before.num_failed)
        in_work = (each for each in self._seen.values() if each.status == "in_progress")
        self._left.set(sum(each.num_lines - each.num_completed - each.num_failed for each in in_work))
