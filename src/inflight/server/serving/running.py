"""`RunningRequest`: what is known of a request while it runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.contracts.outputs import TextDelta
from inflight.contracts.params import SamplingParams


@dataclass(slots=True)
class RunningRequest:
    """A request that has gone to the engine and has not ended.

    Attributes:
        start_time, first_token_time: seconds of `time.monotonic()`.
        num_tokens: generated so far, by all of its sequences.
        texts: pieces of each sequence's text; None: nobody may see them.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int
    texts: list[list[str]] | None = None
    start_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    num_tokens: int = 0

    def observe(self, delta: TextDelta, now: float) -> None:
        """More of it has come."""
        if delta.token_ids and self.first_token_time is None:
            self.first_token_time = now
        self.num_tokens += len(delta.token_ids)
        if self.texts is not None:
            self.texts[delta.index].append(delta.text)
