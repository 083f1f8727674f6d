"""`LiveFeed`: takes snapshots of a running engine for its watchers. An unwatched engine makes no records. Watchers
poll; one that stops polling has gone. Steps between two snapshots are summed up, so the size of a snapshot does not
grow with the step rate.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from inflight.contracts.step.live import LaneWork, LiveSequence, LiveState
from inflight.contracts.step.record import RecordTo, StepRecord
from inflight.engine.engine import Engine
from inflight.host.machine import resident_bytes
from inflight.observe.recorder import RotatingRecorder, observe_with
from inflight.scheduling.sequence import Sequence

SECONDS_TO_ASK_AGAIN = 5.0
"""Seconds without a poll after which a watcher has gone."""

MOST_STEPS = 12
"""Most steps in a snapshot."""

MOST_WAITING = 32
"""Most waiting sequences in a snapshot."""

LONG_QUEUE = 512
"""Longer queues are not sorted for each snapshot."""

BLOCKS_PER_SECOND = 16_384
"""Blocks inspected per second, on average."""


class LiveFeed:
    """Snapshots of one engine.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._others: Callable[[StepRecord], None] | None = None
        self._recorder: RotatingRecorder | None = None
        self._is_watched = False
        self._last_look = self._blocks_due = self._queue_due = 0.0
        self._queue: tuple[LiveSequence, ...] = ()
        self._begin()

    def look(self, record_to: RecordTo | None = None) -> LiveState:
        """Return the engine's state, and its work since the last snapshot.

        Args:
            record_to: where to record steps while the engine is watched; None: nowhere.
        """
        self._last_look = now = self._clock()
        if not self._is_watched:
            self._watch(record_to)
        state = LiveState(
            time=now,
            stats=self._engine.stats(),
            running=tuple(map(_seen, self._running())),
            waiting=self._waiting(now),
            work=tuple(LaneWork(*lane, *work) for lane, work in self._work.items()),
            num_steps=self._num_steps,
            busy_seconds=self._busy_seconds,
            steps=tuple(self._steps),
            num_preempted=self._num_preempted,
            blocks=self._blocks(now),
            resident_bytes=resident_bytes(),
        )
        self._begin()
        return state

    def close(self) -> None:
        """Stop watching."""
        if self._is_watched:
            self._is_watched = False
            self._engine.observer = self._others
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._begin()

    def _watch(self, record_to: RecordTo | None) -> None:
        engine = self._engine
        if record_to is not None:
            self._recorder = RotatingRecorder(record_to, engine.config, engine.model_info)
        self._is_watched, self._others, self._blocks_due = True, engine.observer, 0.0
        recorder = None if self._recorder is None else self._recorder.observe
        engine.observer = observe_with(self._others, recorder, self._observe)

    def _begin(self) -> None:
        """Start the next interval."""
        self._work: dict[tuple[int, str, int], list[int]] = {}
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._num_steps, self._busy_seconds, self._num_preempted = 0, 0.0, 0

    def _observe(self, record: StepRecord) -> None:
        if record.start_time - self._last_look > SECONDS_TO_ASK_AGAIN:
            self.close()
            return
        for slot, request_id, index, _, length, kind, num_draft_tokens, num_accepted in record.spans:
            work = self._work.setdefault((slot, request_id, index), [0, 0, 0, 0])
            work[1 if kind == "decode" else 0] += length - num_draft_tokens
            if num_draft_tokens:
                work[2] += num_accepted
                work[3] += num_draft_tokens - num_accepted
        self._steps.append(record if not record.arrivals else replace(record, arrivals=()))
        self._num_steps += 1
        self._busy_seconds += record.duration
        self._num_preempted += len(record.preempted)

    def _running(self) -> list[Sequence]:
        scheduler = self._engine.scheduler
        return list(islice(scheduler.unfinished(), scheduler.num_running))

    def _waiting(self, now: float) -> tuple[LiveSequence, ...]:
        """The first waiting sequences; of a long queue, as of up to a second ago."""
        scheduler = self._engine.scheduler
        if scheduler.num_waiting < LONG_QUEUE or now >= self._queue_due:
            self._queue = tuple(map(_seen, scheduler.first_waiting(MOST_WAITING)))
            self._queue_due = now + 1.0
        return self._queue

    def _blocks(self, now: float) -> bytes | None:
        """Refresh the slow parts, now and then."""
        if now < self._blocks_due:
            return None
        pool = self._engine.scheduler.block_pool
        self._blocks_due = now + max(1.0, pool.num_blocks / BLOCKS_PER_SECOND)
        if self._recorder is not None:
            self._recorder.flush()
        return pool.holders()


def _seen(sequence: Sequence) -> LiveSequence:
    return LiveSequence(
        sequence.request.request_id,
        sequence.index,
        sequence.slot,
        sequence.num_prompt_tokens,
        len(sequence.token_ids),
        sequence.num_computed_tokens,
        sequence.num_cached_tokens,
        sequence.num_draft_tokens,
        sequence.num_accepted_tokens,
        sequence.num_preemptions,
        sequence.num_blocks,
        sequence.request.priority,
    )
