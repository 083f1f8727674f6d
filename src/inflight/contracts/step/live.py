"""`LiveState`: a snapshot of an engine, and its work since the last snapshot. Plain data for watchers."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from inflight.contracts.step.record import EngineStats, StepRecord


class LiveSequence(NamedTuple):
    """An unfinished sequence.

    Attributes:
        slot: None: it waits.
        num_tokens: prompt and generated tokens.
        num_computed_tokens: how many of these are in the cache.
        num_cached_tokens: prompt tokens that came from the cache.
        num_blocks: blocks of the cache in each of its tables.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    slot: int | None
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_blocks: int
    priority: int


class LaneWork(NamedTuple):
    """Tokens of one sequence computed in a slot since the last snapshot.

    Attributes:
        num_prefilled: of its prompt, or computed again after a preemption.
        num_decoded: generated tokens that were computed one by one.
        num_accepted, num_rejected: draft tokens.
    """

    slot: int
    request_id: str
    index: int  # type: ignore[assignment]
    num_prefilled: int
    num_decoded: int
    num_accepted: int
    num_rejected: int


@dataclass(frozen=True, slots=True)
class LiveState:
    """One snapshot of an engine.

    Attributes:
        time: when it was taken, in seconds of `time.monotonic()`.
        stats: totals since the engine's start.
        running, waiting: sequences with a slot; and the first of those without one, in the order of service.
        work: the computation in each slot since the last snapshot.
        num_steps, busy_seconds: number of steps since then, and their total time.
        steps: the last of them, without arrivals.
        num_preempted: sequences preempted since then.
        blocks: a byte for each block of the cache: 0 is free, 1 is cached, 2 is in one table, 3 in two, and so on up to
            255; None: not looked at this time.
        resident_bytes: memory of the engine's process; 0: unknown.
    """

    time: float
    stats: EngineStats
    running: tuple[LiveSequence, ...]
    waiting: tuple[LiveSequence, ...]
    work: tuple[LaneWork, ...] = ()
    num_steps: int = 0
    busy_seconds: float = 0.0
    steps: tuple[StepRecord, ...] = ()
    num_preempted: int = 0
    blocks: bytes | None = None
    resident_bytes: int = 0

    def renamed(self, names: dict[str, str]) -> "LiveState":
        """Return a copy with requests renamed; those without a new name keep theirs."""

        def named(request_id: str) -> str:
            return names.get(request_id, request_id)

        return replace(
            self,
            running=tuple(each._replace(request_id=named(each.request_id)) for each in self.running),
            waiting=tuple(each._replace(request_id=named(each.request_id)) for each in self.waiting),
            work=tuple(each._replace(request_id=named(each.request_id)) for each in self.work),
            steps=tuple(
                replace(
                    step,
                    spans=tuple(span._replace(request_id=named(span.request_id)) for span in step.spans),
                    preempted=tuple(each._replace(request_id=named(each.request_id)) for each in step.preempted),
                )
                for step in self.steps
            ),
        )
