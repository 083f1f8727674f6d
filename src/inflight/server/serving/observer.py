"""`RequestObserver`: notified of requests and batch jobs, for logs, metrics and traces. Knows neither HTTP nor
metrics."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from inflight.batches.batch import Batch
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams

EndReason: TypeAlias = Literal["stop", "length", "abort", "error", "refused", "timeout"]
"""Why a request ended. "stop", "length": the reason of its first sequence; "abort": its client disconnected or did not
read; "refused": it was never queued; "timeout": it exceeded its time limit."""


class RequestObserver:
    """Called for each prompt's request, in the server's event loop. This base class does nothing.

    An HTTP request with several prompts counts as several requests here, each with its own id.
    """

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        """The request is about to be sent to the engine.

        Args:
            adapter: the name of its adapter; None: none.
        """

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """`num_new_tokens` tokens arrived at `now` (seconds of `time.monotonic()`)."""

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """The request has ended; `output` is None unless it finished. Called once for each started request."""

    def batch_changed(self, batch: Batch) -> None:
        """A batch job has changed."""


class Observers(RequestObserver):
    """Tells several observers, in order.

    Attributes:
        observers: the observers.
    """

    def __init__(self, observers: Iterable[RequestObserver]) -> None:
        self.observers = list(observers)

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        """Tell all of them."""
        for observer in self.observers:
            observer.started(request_id, num_sequences, params, adapter)

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """Tell all of them."""
        for observer in self.observers:
            observer.produced(request_id, num_new_tokens, now)

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """Tell all of them."""
        for observer in self.observers:
            observer.finished(request_id, output, reason)

    def batch_changed(self, batch: Batch) -> None:
        """Tell all of them."""
        for observer in self.observers:
            observer.batch_changed(batch)
