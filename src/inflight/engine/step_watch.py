"""`StepWatch`: makes a `StepRecord` from a plan and the scheduler's state after the step.

The engine and the simulator call it around each step. It reads the scheduler and changes nothing.
"""

from collections.abc import Mapping
from typing import NamedTuple

from inflight.contracts.step.plan import StepPlan
from inflight.contracts.step.record import ArrivalRecord, PreemptionRecord, SpanKind, SpanRecord, StepRecord
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Sequence


class PlannedStep(NamedTuple):
    """A step before it runs.

    Attributes:
        num_accepted_before: for each span with draft tokens, by its place, its sequence and how many of its draft
            tokens had been accepted.
    """

    spans: tuple[SpanRecord, ...]
    preempted: tuple[PreemptionRecord, ...]
    num_accepted_before: Mapping[int, tuple[Sequence, int]]


class StepWatch:
    """Makes the records of one scheduler's steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._arrivals: list[ArrivalRecord] = []
        self.start_over()

    def start_over(self) -> None:
        """Forget all sequences: the scheduler has started over."""
        self._owners: list[Sequence | None] = [None] * self._scheduler.limits.max_num_seqs

    def observe_arrival(self, arrival: ArrivalRecord) -> None:
        """Add a submitted request to the next record."""
        self._arrivals.append(arrival)

    def observe_plan(self, plan: StepPlan) -> PlannedStep:
        """Observe a plan. Call it before the commit, which may remove the plan's sequences."""
        owners, find = self._owners, self._scheduler.running
        preempted = tuple(
            PreemptionRecord(slot, owner.request.request_id, owner.index)
            for slot in plan.released_slots
            if (owner := owners[slot]) is not None and owner.finish_reason is None and owner.slot != slot
        )
        spans, num_accepted_before = list[SpanRecord](), dict[int, tuple[Sequence, int]]()
        for span in plan.spans:
            slot, start, length = span.slot, span.start, len(span.token_ids)
            sequence = owners[slot] = find(span.sequence_id)
            request = sequence.request
            is_decode = length - span.num_draft_tokens == 1 and start >= len(request.prompt_token_ids)
            kind: SpanKind = "chunk" if span.num_logit_rows == 0 else "decode" if is_decode else "prefill"
            if span.num_draft_tokens:
                num_accepted_before[len(spans)] = sequence, sequence.num_accepted_tokens
            spans.append(
                SpanRecord(slot, request.request_id, sequence.index, start, length, kind, span.num_draft_tokens)
            )
        return PlannedStep(tuple(spans), preempted, num_accepted_before)

    def record(self, planned: PlannedStep, step: int, start_time: float, duration: float) -> StepRecord:
        """The record of a finished step; `start_time` and `duration` in seconds."""
        scheduler, pool = self._scheduler, self._scheduler.block_pool
        spans = list(planned.spans)
        for place, (sequence, num_before) in planned.num_accepted_before.items():
            spans[place] = spans[place]._replace(num_accepted=sequence.num_accepted_tokens - num_before)
        arrivals = tuple(self._arrivals)
        self._arrivals.clear()
        return StepRecord(
            step=step,
            start_time=start_time,
            duration=duration,
            spans=tuple(spans),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.count.preemptions,
            num_prompt_tokens=scheduler.count.prompt_tokens,
            num_cached_tokens=scheduler.reuse.num_cached_tokens,
            num_blocks_used=pool.num_used,
            num_blocks_cached=pool.num_cached,
            num_blocks=pool.num_blocks,
            arrivals=arrivals,
            preempted=planned.preempted,
        )
