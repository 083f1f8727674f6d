"""No sequence waits forever, even if better ones keep arriving. This module states and checks the bound.

A sequence X of priority p that arrives at step t can be overtaken only by sequences that arrived before it, and by
sequences of a priority q < p that arrive within (p - q) * aging_steps steps after it: compared with any later one,
floor(waited / aging_steps) of X is larger by at least p - q. Let N be their number, L the steps that each takes, and m
the number of slots. Once no more of them can arrive, each step in which X waits either serves m of them or admits one
of them. Each of them displaces at most one other, which costs one step to compute it again. So X waits at most

    (p - best priority) * aging_steps + N * (L + 1) / m + N        steps, if blocks and budget suffice.
"""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.contracts.step.cache_layout import CacheLayout
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.scheduling.sequence import Request, Sequence


@dataclass
class Stream:
    """An endless stream of requests: `per_step` in each step, each of `length` steps, with these priorities."""

    per_step: int
    length: int
    priorities: list[int]
    num_before: int
    """The number of steps before X arrives."""


streams = st.builds(
    Stream,
    per_step=st.integers(1, 3),
    length=st.integers(1, 8),
    priorities=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    num_before=st.integers(0, 6),
)


def may_overtake(other: Sequence, x: Sequence, aging_steps: int) -> bool:
    if other.sequence_id < x.sequence_id:
        return True
    return other.arrival - x.arrival < (x.request.priority - other.request.priority) * aging_steps


def steps_waited(stream: Stream, num_slots: int, aging_steps: int, priority: int, most: int) -> tuple[int, int]:
    """The number of steps that X waits before it first runs (at most `most`), and the number of sequences that may
    overtake it."""
    scheduler = Scheduler(
        BlockPool(10_000, CacheLayout(4)),
        Limits(max_num_seqs=num_slots, max_num_batched_tokens=1_000),
        aging_steps=aging_steps,
        enable_prefix_caching=False,
    )
    everybody: list[Sequence] = []
    x: Sequence | None = None

    def submit(priority: int, length: int) -> Sequence:
        scheduler.submit(Request(f"{len(everybody)}", [1, 2], 2 + length, priority=priority))
        everybody.append(max(scheduler.unfinished(), key=lambda sequence: sequence.sequence_id))
        return everybody[-1]

    for now in range(stream.num_before + most):
        if now == stream.num_before:
            x = submit(priority, 1)
        for number in range(stream.per_step):
            submit(stream.priorities[(now * stream.per_step + number) % len(stream.priorities)], stream.length)
        best = scheduler.sequences.waiting.best(scheduler.count.steps)
        plan = scheduler.plan()
        assert plan is not None
        if x is not None:
            if x.slot is not None:
                break
            if x is best:
                running = [scheduler.running(span.sequence_id) for span in plan.spans]
                assert len(running) == num_slots
                assert all(may_overtake(other, x, aging_steps) for other in running)
        scheduler.commit(plan, [[7]] * len(plan.spans))
    assert x is not None
    num_overtaking = sum(may_overtake(other, x, aging_steps) for other in everybody if other is not x)
    return (scheduler.count.steps - 1 if x.slot is not None else now + 1) - stream.num_before, num_overtaking


@settings(max_examples=150)
@given(streams, st.integers(1, 4), st.integers(1, 12), st.integers(0, 6))
def test_waiting_under_a_steady_stream_stays_within_the_bound(
    stream: Stream, num_slots: int, aging_steps: int, priority: int
) -> None:
    until_closed = max(0, priority - min(stream.priorities)) * aging_steps
    num_overtaking = (stream.num_before + until_closed + 1) * stream.per_step
    bound = until_closed + math.ceil(num_overtaking * (stream.length + 1) / num_slots) + num_overtaking
    waited, num_counted = steps_waited(stream, num_slots, aging_steps, priority, bound + 1)
    assert num_counted <= num_overtaking
    assert waited <= bound


def test_the_same_stream_starves_a_sequence_that_does_not_age() -> None:
    stream = Stream(per_step=2, length=4, priorities=[0], num_before=3)
    waited, _ = steps_waited(stream, num_slots=2, aging_steps=10_000, priority=3, most=500)
    assert waited == 500
    waited, _ = steps_waited(stream, num_slots=2, aging_steps=5, priority=3, most=500)
    assert 15 <= waited <= 15 + 36 * 5 / 2 + 36
