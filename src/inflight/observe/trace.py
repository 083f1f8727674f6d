"""Turns a recording into stretches to draw (a request's time in a slot) and into Chrome/Perfetto events.

Gaps in a lane: a sequence that keeps its slot without computing waits; one that lost its slot is preempted until it
runs again, or until another sequence takes the slot. Times are seconds from the recording's start.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from inflight.contracts.step.record import StepRecord
from inflight.observe.pictures import write_file
from inflight.observe.recorder import Recording

StretchKind: TypeAlias = Literal["prefill", "chunk", "decode", "waiting", "preempted"]

COLOURS: dict[StretchKind, str] = {
    "prefill": "#e8a33d",
    "chunk": "#b8651b",
    "decode": "#2f8f5b",
    "waiting": "#c9c9c9",
    "preempted": "#c63d3d",
}

SLOTS, REQUESTS = 1, 2
"""The two "processes" of a Chrome trace."""

Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Stretch:
    """Consecutive steps in which one sequence did the same in one slot.

    Attributes:
        first_step, last_step: indices into `Recording.steps`, both inclusive.
        start: the position of the first computed token.
        num_tokens: computed tokens; 0 if the sequence waits or is preempted.
    """

    slot: int
    request_id: str
    index: int
    kind: StretchKind
    first_step: int
    last_step: int
    start: int
    num_tokens: int


def stretches(steps: Sequence[StepRecord]) -> list[Stretch]:
    """Return all stretches of a run; those of one slot do not overlap. A gap between them is an idle slot."""
    computed = _computed(steps)
    on_slot: defaultdict[int, list[Stretch]] = defaultdict(list)
    of_sequence: defaultdict[tuple[str, int], list[Stretch]] = defaultdict(list)
    for stretch in computed:
        on_slot[stretch.slot].append(stretch)
        of_sequence[stretch.request_id, stretch.index].append(stretch)
    preempted: list[Stretch] = []
    lost: set[tuple[int, int]] = set()  # (slot, step in which the slot runs again)
    for number, step in enumerate(steps):
        for slot, request_id, index in step.preempted:
            slot_again = _next_step(on_slot[slot], number, len(steps))
            back = _next_step(of_sequence[request_id, index], number, len(steps))
            lost.add((slot, slot_again))
            if (end := min(slot_again, back)) > number:
                preempted.append(Stretch(slot, request_id, index, "preempted", number, end - 1, 0, 0))
    waiting = [
        Stretch(one.slot, one.request_id, one.index, "waiting", one.last_step + 1, after.first_step - 1, after.start, 0)
        for lane in on_slot.values()
        for one, after in pairwise(lane)
        if (one.request_id, one.index) == (after.request_id, after.index)
        and one.last_step + 1 < after.first_step
        and (one.slot, after.first_step) not in lost
    ]
    return computed + preempted + waiting


def _computed(steps: Sequence[StepRecord]) -> list[Stretch]:
    """Join spans of one sequence and kind in consecutive steps; the result is in order of first steps."""
    latest: dict[int, Stretch] = {}
    done: list[Stretch] = []
    for number, step in enumerate(steps):
        for slot, request_id, index, start, length, kind, *_ in step.spans:
            one = latest.get(slot)
            known = None if one is None else (one.request_id, one.index, one.kind, one.last_step)
            if one is not None and known == (request_id, index, kind, number - 1):
                one.last_step = number
                one.num_tokens += length
            else:
                latest[slot] = Stretch(slot, request_id, index, kind, number, number, start, length)
                done.append(latest[slot])
    return done


def _next_step(ordered: Sequence[Stretch], step: int, otherwise: int) -> int:
    """Return the first step, from `step` on, in which one of the stretches begins; else `otherwise`."""
    place = bisect_left(ordered, step, key=attrgetter("first_step"))
    return ordered[place].first_step if place < len(ordered) else otherwise


def start_of(recording: Recording) -> float:
    """Return the start of a recording, in seconds: the first request's arrival, or the first step's start if that is
    earlier."""
    first_steps = [step.start_time for step in recording.steps[:1]]
    return min([*(arrival.time for arrival in recording.arrivals), *first_steps], default=0.0)


def num_lanes(recording: Recording) -> int:
    """The number of lanes: one for each slot up to the last that ever ran a sequence, at least one."""
    return 1 + max((span.slot for step in recording.steps for span in step.spans), default=0)


# ----------------------------------------------------------------------------------------------- Chrome trace events


def chrome_events(recording: Recording) -> Iterator[Event]:
    """Yield events in the Trace Event Format of Chrome and Perfetto, with times in microseconds.

    Each span, and each stretch of waiting or preemption, is a complete event on its slot's track; each preemption is an
    instant event; each request's time in the queue is an asynchronous event; each step has counters.
    """
    begin = start_of(recording)
    ends = [step.start_time + step.duration - begin for step in recording.steps]
    yield from _names(recording)
    yield from _queueing(recording, begin)
    for number, step in enumerate(recording.steps):
        start = step.start_time - begin
        for span in step.spans:
            arguments = {"step": step.step, "start": span.start, "tokens": span.length, "sequence": span.index}
            if span.num_draft_tokens:
                arguments |= {"proposed": span.num_draft_tokens, "accepted": span.num_accepted}
            event = _complete(span.slot, span.request_id, span.index, span.kind, start, ends[number])
            yield event | {"args": arguments}
        for slot, request_id, index in step.preempted:
            name = f"preempted {_name(request_id, index)}"
            yield {"ph": "i", "s": "t", "name": name, "pid": SLOTS, "tid": slot, "ts": _microseconds(start)}
        yield from _counters(step, start)
    for stretch in stretches(recording.steps):
        if stretch.num_tokens == 0:
            start, end = recording.steps[stretch.first_step].start_time - begin, ends[stretch.last_step]
            yield _complete(stretch.slot, stretch.request_id, stretch.index, stretch.kind, start, end)


def write_chrome_trace(recording: Recording, path: Path) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev. Raises `ValueError` if it cannot be written."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in chrome_events(recording))
    write_file(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n'.encode())


def _names(recording: Recording) -> Iterator[Event]:
    for pid, name in ((SLOTS, "slots"), (REQUESTS, "queue")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for slot in range(num_lanes(recording)):
        yield {"ph": "M", "name": "thread_name", "pid": SLOTS, "tid": slot, "args": {"name": f"slot {slot}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": SLOTS, "tid": slot, "args": {"sort_index": slot}}


def _queueing(recording: Recording, begin: float) -> Iterator[Event]:
    """Yield events that last from a request's arrival to its first span."""
    arrivals = {arrival.request_id: arrival.time for arrival in recording.arrivals}
    for step in recording.steps:
        for span in step.spans:
            if (arrival := arrivals.pop(span.request_id, None)) is not None:
                common = {"cat": "queue", "name": f"{span.request_id} waiting", "id": span.request_id, "pid": REQUESTS}
                for ph, time in (("b", arrival), ("e", step.start_time)):
                    yield {"ph": ph, **common, "tid": 0, "ts": _microseconds(time - begin)}


def _complete(slot: int, request_id: str, index: int, kind: str, start: float, end: float) -> Event:
    """Return an event that has a beginning and an end."""
    return {
        "ph": "X",
        "name": f"{_name(request_id, index)} {kind}",
        "cat": kind,
        "pid": SLOTS,
        "tid": slot,
        "ts": _microseconds(start),
        "dur": max(_microseconds(end) - _microseconds(start), 0),
    }


def _counters(step: StepRecord, start: float) -> Iterator[Event]:
    num_free = step.num_blocks - step.num_blocks_used - step.num_blocks_cached
    series = {
        "blocks": {"used": step.num_blocks_used, "cached": step.num_blocks_cached, "free": num_free},
        "sequences": {"running": step.num_running, "waiting": step.num_waiting},
        "tokens in a step": {"tokens": step.num_tokens},
    }
    for name, values in series.items():
        yield {"ph": "C", "name": name, "pid": SLOTS, "tid": 0, "ts": _microseconds(start), "args": values}


def _name(request_id: str, index: int) -> str:
    return f"{request_id}.{index}" if index else request_id


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
