"""Recordings: reading returns what was written, no text is recorded, and a broken file is reported in one sentence."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.record import ArrivalRecord, StepRecord
from inflight.engine.engine import Engine
from inflight.observe.recorder import Recorder, read_recording
from inflight.observe.run_report import report_of, sequence_times
from tests import zoo
from tests.observe.recordings import NUM_TOKENS, PROMPTS, params, run_recorded

EMPTY = StepRecord(0, 0.0, 0.5, (), 0, 0, 0, 0, 0, 0, 0, 8)


def arrivals_of(path: Path, *arrivals: ArrivalRecord, block_size: int = 4) -> list[ArrivalRecord]:
    with Recorder(path, EngineConfig(block_size=block_size)) as recorder:
        recorder.observe(replace(EMPTY, arrivals=arrivals))
    return read_recording(path).arrivals


def test_reading_a_recording_returns_the_observed_steps(tmp_path: Path) -> None:
    records = run_recorded(tmp_path / "run")
    recording = read_recording(tmp_path / "run")
    assert sum(len(record.preempted) for record in records) == records[-1].num_preemptions > 0
    assert records[-1].num_cached_tokens > 0
    assert {span.kind for record in records for span in record.spans} == {"prefill", "chunk", "decode"}
    assert [replace(step, arrivals=()) for step in recording.steps] == [replace(step, arrivals=()) for step in records]
    seen = [arrival for record in records for arrival in record.arrivals]
    told = [(each.request_id, each.time, len(each.prompt_token_ids)) for each in recording.arrivals]
    assert told == [(each.request_id, each.time, len(each.prompt_token_ids)) for each in seen]
    assert recording.config.kv_cache.num_blocks == 13
    assert recording.model is not None
    assert recording.config.max_model_len == recording.model.max_model_len
    assert recording.machine["python"]


def test_every_sequence_has_its_number_of_tokens(tmp_path: Path) -> None:
    run_recorded(tmp_path / "run", n=2)
    times = sequence_times(read_recording(tmp_path / "run"))
    expected = {(f"<{number}>", index): count for number, count in enumerate(NUM_TOKENS) for index in (0, 1)}
    assert {key: each.num_output_tokens for key, each in times.items()} == expected


def test_stand_ins_share_exactly_the_full_blocks_that_the_prompts_shared(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8]]
    arrivals = [ArrivalRecord(str(number), 0.0, prompt) for number, prompt in enumerate(prompts)]
    salted = ArrivalRecord("salted", 0.0, prompts[0], cache_salt="mine")
    one, other, same, later, alone = (a.prompt_token_ids for a in arrivals_of(tmp_path / "run", *arrivals, salted))
    assert [len(prompt) for prompt in (one, other, same, later, alone)] == [9, 8, 8, 4, 9]
    assert one[:4] == other[:4]
    assert one[4:8] != other[4:8]
    assert one[:8] == same
    assert later not in (one[:4], one[4:8])  # the same tokens after different ones
    assert alone[:4] != one[:4]


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_stand_ins_fit_blocks_of_any_size(tmp_path: Path, block_size: int) -> None:
    arrival = ArrivalRecord("a", 0.0, list(range(20)))
    (found,) = arrivals_of(tmp_path / "run", arrival, block_size=block_size)
    assert len(found.prompt_token_ids) == 20
    assert all(0 <= token < 2**31 for token in found.prompt_token_ids)


def test_a_prompt_cannot_be_identified_from_its_recording(tmp_path: Path) -> None:
    """This holds even for a known prompt: two recordings of it have nothing in common."""
    prompt = list(range(4_000_000, 4_000_008))
    hashes = []
    for name in ("one", "other"):
        arrivals_of(tmp_path / name, ArrivalRecord("a", 0.0, prompt, cache_salt="a secret"))
        text = (tmp_path / name).read_text()
        assert "a secret" not in text
        assert not {int(number) for number in re.findall(r"\d+", text)} & set(prompt)
        hashes.append(json.loads(text.splitlines()[1])["arrivals"][0]["block_hashes"])
    assert not set(hashes[0]) & set(hashes[1])


def test_a_preempted_request_is_recorded_with_its_slot(tmp_path: Path) -> None:
    records = run_recorded(tmp_path / "run")
    for before, record in pairwise(records):
        for slot, request_id, index in record.preempted:
            assert not any((s.slot, s.request_id) == (slot, request_id) for s in record.spans)
            assert any(
                (s.slot, s.request_id, s.index) == (slot, request_id, index)
                for r in records[: before.step + 1]
                for s in r.spans
            )


def test_an_interrupted_step_is_not_recorded_as_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots released for a step that did not run are reported again after other requests already have them."""
    engine = Engine(zoo.build("llama"), EngineConfig(max_num_seqs=1))
    records: list[StepRecord] = []
    engine.observer = records.append
    for number in range(2):
        engine.submit(engine.inputs.accept(str(number), [1, 2, 3], params(2)))
    run, steps = engine.runner.run, iter(range(100))

    def interrupted(plan: object, masks: object) -> object:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return run(plan, masks)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", interrupted)
    while engine.has_unfinished_requests:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert [record.preempted for record in records] == [()] * 4


def test_no_records_are_created_without_an_observer() -> None:
    engine = Engine(zoo.build("llama"), EngineConfig())
    engine.submit(engine.inputs.accept("unseen", [1, 2, 3], params(3)))
    engine.step()
    records: list[StepRecord] = []
    engine.observer = records.append
    engine.submit(engine.inputs.accept("seen", [1, 2, 3], params(3)))
    while engine.has_unfinished_requests:
        engine.step()
    assert [arrival.request_id for record in records for arrival in record.arrivals] == ["seen"]
    assert [record.step for record in records] == [1, 2, 3]


def test_the_report_of_a_recording(tmp_path: Path) -> None:
    records = run_recorded(tmp_path / "run")
    report = report_of(read_recording(tmp_path / "run"))
    assert report.num_steps == len(records)
    assert report.num_sequences == len(PROMPTS)
    assert report.num_output_tokens == sum(NUM_TOKENS)
    assert report.num_prompt_tokens == sum(map(len, PROMPTS))
    assert report.num_preemptions == records[-1].num_preemptions
    assert report.hit_rate == records[-1].num_cached_tokens / sum(map(len, PROMPTS))
    assert report.peak_blocks_used == max(record.num_blocks_used for record in records) <= 13
    first, last = records[0].arrivals[0].time, records[-1].start_time + records[-1].duration
    assert report.seconds == pytest.approx(last - first)
    assert 0 < report.time_to_first_token.p50 <= report.latency.p50 <= report.latency.p99 <= report.seconds * 1.001


def test_a_run_that_was_killed_can_be_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    records = run_recorded(tmp_path / "run")
    text = (tmp_path / "run").read_text()
    (tmp_path / "cut").write_text(text[:-20])
    assert len(read_recording(tmp_path / "cut").steps) == len(records) - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a recording"),
        ("hello\n", "is not a recording"),
        ('{"inflight_recording": 99}\n', "format"),
        ("[]\n", "is not a recording"),
    ],
)
def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recording(tmp_path / "file")


def test_a_broken_line_is_reported_with_its_number(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run", EngineConfig()) as recorder:
        recorder.observe(EMPTY)
    with (tmp_path / "run").open("a") as file:
        file.write('{"step": 1}\n')
    with pytest.raises(ValueError, match="line 3 of the recording"):
        read_recording(tmp_path / "run")


def test_a_file_that_cannot_be_opened_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        Recorder(tmp_path / "no" / "run", EngineConfig())
    with pytest.raises(ValueError, match="cannot be read"):
        read_recording(tmp_path / "nothing")


def test_a_recording_without_steps_has_no_report(tmp_path: Path) -> None:
    Recorder(tmp_path / "run", EngineConfig()).close()
    with pytest.raises(ValueError, match="has no steps"):
        report_of(read_recording(tmp_path / "run"))
