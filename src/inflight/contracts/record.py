"""`StepRecord`: what one step did; `EngineStats`: what all did. Plain data: for timelines, recordings and counters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

SpanKind: TypeAlias = Literal["prefill", "chunk", "decode"]


class SpanRecord(NamedTuple):
    """One span as it ran: `kind` is "chunk" if it ended before its sequence's last token, "decode" if it computed one
    generated token, else "prefill" (a prompt's last part, or a preempted sequence's recomputation).

    (A named tuple, because many are made in each step: that takes a third of a frozen dataclass's time.)
    """

    slot: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    length: int
    kind: SpanKind


class PreemptionRecord(NamedTuple):
    """A sequence that had to give everything back, and the slot that it lost."""

    slot: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


@dataclass(frozen=True, slots=True)
class ArrivalRecord:
    """A request that was submitted, and when (seconds of `time.monotonic()`)."""

    request_id: str
    time: float
    prompt_token_ids: Sequence[int]
    num_sequences: int = 1
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its number from 0, when it ran (seconds of `time.monotonic()`), which spans, the state it left behind.

    `num_preemptions`, `num_prompt_tokens` (of admitted sequences) and `num_cached_tokens` (of these, how many did not
    have to be computed) count from the engine's start. Blocks are used (held by a sequence), cached (held by nobody,
    their content can be found), or free.

    Attributes:
        arrivals: what was submitted since the step before was told of.
        preempted: who had to make room for this step.
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
    arrivals: tuple[ArrivalRecord, ...] = ()
    preempted: tuple[PreemptionRecord, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed: what it used of its budget."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's totals since it was started, and its state now.

    Attributes:
        num_requests: that were queued (those refused are not counted).
        num_prompt_tokens: of sequences that have been admitted, each once.
        num_cached_tokens: of these, how many did not have to be computed.
        num_generated_tokens: that were reported to callers.
        num_running, num_waiting: sequences with and without a slot.
        num_blocks_used, num_blocks_cached, num_blocks_free: blocks held by a sequence, held by nobody with content that
            can be found, and the rest.
        num_crashes: how often the engine died before and was started anew; all else counts from its last start.
    """

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_cached: int
    num_blocks_free: int
    num_crashes: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that did not have to be computed."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
