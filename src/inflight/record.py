"""`StepRecord`: what one step did, as plain data: for live views, timelines and counters."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

SpanKind: TypeAlias = Literal["prefill", "chunk", "decode"]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span as it ran: `kind` is "chunk" if it ended before its sequence's last token, "decode" if it computed one
    generated token, else "prefill" (a prompt's last part, or a preempted sequence's recomputation)."""

    slot: int
    request_id: str
    index: int
    start: int
    length: int
    kind: SpanKind


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its number from 0, when it ran (seconds of `time.monotonic()`), which spans, the state it left behind.

    `num_preemptions`, `num_prompt_tokens` (of admitted sequences) and `num_cached_tokens` (of these, how many did not
    have to be computed) count from the engine's start. Blocks are used (held by a sequence), cached (held by nobody,
    their content can be found), or free.
    """

    step: int
    start_time: float
    duration: float
    spans: tuple[SpanRecord, ...]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_blocks_used: int
    num_blocks_cached: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(span.length for span in self.spans)
