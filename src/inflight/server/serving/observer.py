"""`RequestObserver`: what is told of every request that is run, to whoever counts. Knows neither HTTP nor metrics."""

from typing import Literal, TypeAlias

from inflight.contracts.outputs import RequestOutput
from inflight.contracts.params import SamplingParams

EndReason: TypeAlias = Literal["stop", "length", "abort", "error", "refused", "timeout"]
"""How a request ended: "stop" and "length" as its first sequence did; "abort": its client left, or did not read;
"refused": it was never queued; "timeout": its time was up."""


class RequestObserver:
    """Hears of each prompt's request, in the server's event loop; this one does nothing about it.

    An HTTP request with several prompts is several requests here, each with an id of its own.
    """

    def started(self, request_id: str, num_sequences: int, params: SamplingParams) -> None:
        """It is about to be handed to the engine."""

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """So many tokens have come, at `now` (seconds of `time.monotonic()`)."""

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """It has ended; `output` is None unless it ran to its end. Told once for each that has started."""
