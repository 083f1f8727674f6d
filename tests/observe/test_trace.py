"""Traces have every span exactly once, correct gaps, and self-contained files."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.record import PreemptionRecord, SpanKind, SpanRecord, StepRecord
from inflight.observe.pictures import save_png
from inflight.observe.recorder import Recording, read_recording
from inflight.observe.timeline import MARKS
from inflight.observe.trace import Stretch, chrome_events, stretches, write_chrome_trace
from inflight.observe.trace_page import page_data, trace_figure, write_page
from tests.observe.recordings import run_recorded

EMPTY = StepRecord(0, 0.0, 1.0, (), 0, 0, 0, 0, 0, 0, 0, 8)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("recordings") / "run"
    run_recorded(path)
    return read_recording(path)


def step(number: int, *spans: tuple[int, str, int, int, SpanKind], preempted: tuple[Any, ...] = ()) -> StepRecord:
    """A step with spans given as (slot, request, start, length, kind)."""
    records = tuple(SpanRecord(slot, request, 0, *rest) for slot, request, *rest in spans)  # type: ignore[arg-type]
    return replace(EMPTY, step=number, start_time=float(number), spans=records, preempted=preempted)


def drawn(*steps: StepRecord) -> list[tuple[int, str, str, int, int]]:
    return sorted((s.slot, s.request_id, s.kind, s.first_step, s.last_step) for s in stretches(steps))


def test_consecutive_steps_of_one_kind_are_merged() -> None:
    steps = [
        step(0, (0, "a", 0, 4, "chunk"), (1, "b", 0, 2, "prefill")),
        step(1, (0, "a", 4, 4, "chunk"), (1, "b", 2, 1, "decode")),
        step(2, (0, "a", 8, 1, "prefill"), (1, "c", 0, 1, "prefill")),
    ]
    assert stretches(steps)[0] == Stretch(0, "a", 0, "chunk", 0, 1, 0, 8)
    assert drawn(*steps) == [
        (0, "a", "chunk", 0, 1),
        (0, "a", "prefill", 2, 2),
        (1, "b", "decode", 1, 1),
        (1, "b", "prefill", 0, 0),
        (1, "c", "prefill", 2, 2),
    ]


def test_a_gap_between_spans_of_one_sequence_is_waiting_and_any_other_is_idle() -> None:
    steps = [step(0, (0, "a", 0, 4, "chunk")), step(1), step(2), step(3, (0, "a", 4, 1, "prefill")), step(4)]
    assert drawn(*steps, step(5, (0, "b", 0, 1, "prefill"))) == [
        (0, "a", "chunk", 0, 0),
        (0, "a", "prefill", 3, 3),
        (0, "a", "waiting", 1, 2),
        (0, "b", "prefill", 5, 5),
    ]


@pytest.mark.parametrize(
    ("returns", "ends"),
    [
        ([step(3, (0, "a", 0, 6, "prefill"))], 2),  # to its own slot
        ([step(3, (1, "a", 0, 6, "prefill")), step(4, (0, "b", 0, 1, "prefill"))], 2),  # to another slot
        ([step(3, (0, "b", 0, 1, "prefill")), step(4, (1, "a", 0, 6, "prefill"))], 2),  # its slot is taken
        ([step(3), step(4)], 4),  # not at all
    ],
)
def test_a_preempted_sequence_is_shown_as_such_until_it_returns_or_its_slot_is_taken(
    returns: list[StepRecord], ends: int
) -> None:
    lost = step(1, preempted=(PreemptionRecord(0, "a", 0),))
    found = drawn(step(0, (0, "a", 0, 4, "prefill")), lost, step(2), *returns)
    assert (0, "a", "preempted", 1, ends) in found
    assert not [each for each in found if each[2] == "waiting"]


def test_a_slot_that_is_taken_at_once_shows_no_gap() -> None:
    lost = step(1, (0, "b", 0, 1, "prefill"), preempted=(PreemptionRecord(0, "a", 0),))
    assert drawn(step(0, (0, "a", 0, 4, "prefill")), lost) == [
        (0, "a", "prefill", 0, 0),
        (0, "b", "prefill", 1, 1),
    ]


def test_stretches_cover_every_span_and_never_overlap(recording: Recording) -> None:
    covered: Counter[tuple[int, int]] = Counter()
    found = stretches(recording.steps)
    assert {one.kind for one in found} == {"prefill", "chunk", "decode", "preempted"}
    for one in found:
        covered.update((one.slot, number) for number in range(one.first_step, one.last_step + 1))
    assert set(covered.values()) == {1}
    assert {(span.slot, number) for number, each in enumerate(recording.steps) for span in each.spans} <= set(covered)
    assert sum(one.num_tokens for one in found) == sum(each.num_tokens for each in recording.steps)


def test_a_chrome_trace_has_every_span_exactly_once(recording: Recording, tmp_path: Path) -> None:
    write_chrome_trace(recording, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == list(chrome_events(recording))
    begin = recording.arrivals[0].time
    spans = Counter(
        (e["tid"], e["name"], e["ts"], e["args"]["start"], e["args"]["tokens"], e["cat"])
        for e in events
        if e["ph"] == "X" and "args" in e
    )
    expected = Counter(
        (s.slot, f"{s.request_id} {s.kind}", round((each.start_time - begin) * 1e6, 3), s.start, s.length, s.kind)
        for each in recording.steps
        for s in each.spans
    )
    assert spans == expected
    instants = [e for e in events if e["ph"] == "i"]
    assert len(instants) == recording.steps[-1].num_preemptions > 0


def test_chrome_events_have_the_fields_of_their_phase(recording: Recording) -> None:
    """The fields are those of the Trace Event Format:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    required = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur"},
        "C": {"name", "pid", "ts", "args"},
        "i": {"name", "pid", "tid", "ts", "s"},
        "M": {"name", "pid", "args"},
        "b": {"name", "cat", "id", "pid", "ts"},
        "e": {"name", "cat", "id", "pid", "ts"},
    }
    for event in chrome_events(recording):
        assert required[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())


def test_events_of_one_track_do_not_overlap(recording: Recording) -> None:
    """Perfetto nests overlapping events, so one lane would become several."""
    complete = sorted((e["tid"], e["ts"], e["dur"]) for e in chrome_events(recording) if e["ph"] == "X")
    for (tid, ts, dur), (next_tid, next_ts, _) in pairwise(complete):
        assert tid != next_tid or ts + dur <= next_ts + 1e-3


def test_counters_show_the_state_after_each_step(recording: Recording) -> None:
    blocks = [e["args"] for e in chrome_events(recording) if e["ph"] == "C" and e["name"] == "blocks"]
    sequences = [e["args"] for e in chrome_events(recording) if e["ph"] == "C" and e["name"] == "sequences"]
    assert all(sum(each.values()) == 13 for each in blocks)
    used = [(each.num_blocks_used, each.num_blocks_cached) for each in recording.steps]
    assert [(each["used"], each["cached"]) for each in blocks] == used
    assert sequences == [{"running": s.num_running, "waiting": s.num_waiting} for s in recording.steps]


def test_every_request_waits_once_in_the_queue(recording: Recording) -> None:
    asynchronous = [e for e in chrome_events(recording) if e["ph"] in "be"]
    begins, ends = ({e["id"]: e["ts"] for e in asynchronous if e["ph"] == ph} for ph in "be")
    assert begins.keys() == ends.keys() == {arrival.request_id for arrival in recording.arrivals}
    assert all(ends[each] >= begins[each] for each in begins)


def test_a_page_is_self_contained_and_escapes_names_given_by_callers(recording: Recording, tmp_path: Path) -> None:
    write_page(recording, tmp_path / "page.html", "a <run>")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>a &lt;run&gt;</title>" in page
    assert not any(word in page for word in ("http:", "https:", "src=", "@import", "<link", "<0>"))
    assert page.count("<script>") == 1
    data = json.loads(page.split("const trace = ")[1].split(";\n")[0])
    assert data == json.loads(json.dumps(page_data(recording)))
    assert set(data["requests"]) == {f"<{number}>" for number in range(7)}
    assert len(data["starts"]) == len(data["used"]) == len(recording.steps)
    assert len(data["stretches"]) == len(stretches(recording.steps))


@pytest.mark.thorough
def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """5,000 steps of 64 slots: 320,000 spans."""
    steps = [
        step(number, *((slot, f"{slot} {number // 100}", number, 1, "decode") for slot in range(64)))
        for number in range(5000)
    ]
    write_page(Recording(EngineConfig(), None, {}, steps), tmp_path / "page.html", "long")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_the_picture_is_a_valid_image(recording: Recording, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = trace_figure(recording)
    boxes = sum(len(collection.get_paths()) for collection in figure.axes[0].collections)
    assert boxes == len(stretches(recording.steps))
    save_png(figure, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_slots_that_never_ran_have_no_lane(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [step(0, (0, "a", 0, 5, "prefill"), (1, "b", 0, 5, "prefill")), step(1, (1, "b", 5, 1, "decode"))]
    few = Recording(EngineConfig(max_num_seqs=64), None, {}, steps)
    assert page_data(few)["slots"] == 2
    assert {e["tid"] for e in chrome_events(few) if e["ph"] == "M" and e["name"] == "thread_name"} == {0, 1}
    lanes, _, queue = trace_figure(few).axes
    assert lanes.get_ylim() == (1.5, -0.5)
    assert lanes.get_title(loc="left") == "2 of 64 slots were ever in use"
    assert queue.get_ylim()[1] >= 1, "nothing waits, and the axis counts sequences"
    assert all(float(tick).is_integer() for tick in queue.get_yticks())
    write_page(few, tmp_path / "page.html", "few")
    assert "2 of 64 slots were ever in use" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_timeline_without_colours_tells_all_uses_apart() -> None:
    assert len({mark for mark, _ in MARKS.values()}) == len(MARKS)


def test_a_failure_to_draw_or_write_is_reported_in_one_sentence(recording: Recording, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="has no steps"):
        trace_figure(replace(recording, steps=[]))
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        write_chrome_trace(recording, tmp_path / "no" / "trace.json")
