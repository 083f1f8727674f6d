"""`StepRecord`: what one step did; `EngineStats`: totals of all steps. Plain data for timelines, recordings,
counters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

from inflight.contracts.api.options import Positive, strict_options

SpanKind: TypeAlias = Literal["prefill", "chunk", "decode"]


class SpanRecord(NamedTuple):
    """One span as it ran.

    `kind` is "chunk" if it ended before its sequence's last token, "decode" if it computed one generated token, else
    "prefill" (a prompt's last part, or the recomputation of a preempted sequence). Of its tokens, the last
    `num_draft_tokens` were draft tokens, of which `num_accepted` were right. A named tuple, because a step makes many:
    that takes a third of the time of a frozen dataclass.
    """

    slot: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    start: int
    length: int
    kind: SpanKind
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the step added to its sequence; some may lie beyond its end."""
        return 0 if self.kind == "chunk" else 1 + self.num_accepted


class PreemptionRecord(NamedTuple):
    """A preempted sequence, and the slot that it lost."""

    slot: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here


@dataclass(frozen=True, slots=True)
class ArrivalRecord:
    """A submitted request, its time (seconds of `time.monotonic()`), and its salt and adapter."""

    request_id: str
    time: float
    prompt_token_ids: Sequence[int]
    num_sequences: int = 1
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its number from 0, when it ran (seconds of `time.monotonic()`), its spans, and the state after it.

    Attributes:
        num_preemptions, num_prompt_tokens, num_cached_tokens: counted since the engine's start; see `EngineStats`.
        num_blocks_used, num_blocks_cached, num_blocks: the other blocks are free; see `BlockPool`.
        arrivals: requests submitted since the record before.
        preempted: sequences preempted to make room for this step.
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
        """Tokens that the step computed."""
        return sum(span.length for span in self.spans)


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of step sizes, in tokens."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's totals since its start, and its current state.

    Attributes:
        num_requests: requests that were queued; refused ones are not counted.
        num_prompt_tokens: prompt tokens of sequences that have had a slot, each sequence counted once.
        num_cached_tokens: how many of these came from the cache.
        num_generated_tokens: tokens reported to callers.
        num_drafts: spans with draft tokens.
        num_draft_tokens, num_accepted_tokens: draft tokens verified, and accepted.
        num_restored_tokens: tokens whose keys and values came from `prefix_cache_dir`.
        num_running, num_waiting: sequences with and without a slot.
        num_blocks_used, num_blocks_cached, num_blocks_free: see `BlockPool`.
        num_blocks_kept: how many of the cached ones are kept for sessions (`Retention`).
        num_crashes: number of restarts after a crash; everything else counts from the last start.
        num_step_tokens: tokens computed by all steps.
        num_steps_by_size: steps by number of tokens, one count for each bucket of `STEP_SIZES`, and one for larger
            steps.
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
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_restored_tokens: int = 0
    num_step_tokens: int = 0
    num_blocks_kept: int = 0
    num_steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that came from the cache, from 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def sum_of(stats: Iterable[EngineStats]) -> EngineStats:
    """The sum over several engines."""
    totals: dict[str, Any] = {}
    each = list(stats)
    for field in fields(EngineStats):
        column = [getattr(one, field.name) for one in each]
        is_tuple = field.name == "num_steps_by_size"
        totals[field.name] = tuple(map(sum, zip(*column, strict=True))) if is_tuple else sum(column)
    return EngineStats(**totals)


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTo:
    """The recording options of an engine.

    Attributes:
        path: the newest file; older ones have a number appended.
        max_bytes: the size after which the next file begins.
        num_files: how many are kept.
    """

    path: str
    max_bytes: Positive = 2**26
    num_files: Positive = 4
