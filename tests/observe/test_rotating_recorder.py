"""Recordings of a server: files of a limited size, each readable by itself, and none that can harm the engine."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.step.record import RecordTo, StepRecord
from inflight.observe.recorder import RotatingRecorder, read_recording

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=200)


def records(llm: LLM) -> list[StepRecord]:
    """The steps of two requests with a common prefix, one after the other."""
    seen: list[StepRecord] = []
    llm.engine.observer = seen.append
    for end in ("dragon", "fox"):
        llm.generate("Once upon a time there was a little boy who had a very big " + end, PARAMS, use_tqdm=False)
    llm.engine.observer = None
    return seen


def test_full_files_move_on_and_the_oldest_goes(llm: LLM, tmp_path: Path) -> None:
    path, seen = tmp_path / "run.jsonl", records(llm)
    whole = RotatingRecorder(RecordTo(path=str(path)), llm.engine.config, llm.model_info)
    for record in seen:
        whole.observe(record)
    whole.close()
    size = path.stat().st_size
    steps = read_recording(path).steps
    assert len(steps) == len(seen)
    to = RecordTo(path=str(path), max_bytes=size // 2, num_files=3)
    rotating = RotatingRecorder(to, llm.engine.config, llm.model_info)
    for record in seen * 3:
        rotating.observe(record)
    rotating.close()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["run.jsonl", "run.jsonl.1", "run.jsonl.2"]
    assert all((tmp_path / name).stat().st_size < size for name in names)
    kept = [step for name in reversed(names) for step in read_recording(tmp_path / name).steps]
    numbers = [step.step for step in kept]
    assert numbers == [record.step for record in seen * 3][-len(numbers) :]


def test_files_of_one_engine_have_the_same_prefixes(llm: LLM, tmp_path: Path) -> None:
    path, seen = tmp_path / "run.jsonl", [record for record in records(llm) if record.arrivals]
    rotating = RotatingRecorder(RecordTo(path=str(path), max_bytes=1), llm.engine.config, llm.model_info)
    for record in seen:
        rotating.observe(record)
    rotating.close()
    first, second = (read_recording(tmp_path / f"run.jsonl.{number}").arrivals[0] for number in (2, 1))
    assert first.prompt_token_ids[:16] == second.prompt_token_ids[:16] != [0] * 16


def test_a_recording_that_cannot_be_written_ends_with_a_line(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, seen = tmp_path / "folder", records(llm)
    folder.mkdir()
    to = RecordTo(path=str(folder / "run.jsonl"), max_bytes=1)
    rotating = RotatingRecorder(to, llm.engine.config, llm.model_info)
    rotating.observe(seen[0])
    shutil.rmtree(folder)
    for record in seen[1:]:
        rotating.observe(record)
    rotating.close()
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("recording of steps has stopped: the recording '")


@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_that_is_stopped_has_recorded_all(tmp_path: Path, in_process: bool) -> None:
    path = tmp_path / "run.jsonl"

    async def run() -> None:
        async with AsyncLLM(record_to=RecordTo(path=str(path)), in_process=in_process, num_blocks=100) as llm:
            async for _ in llm.generate("Once upon a time", PARAMS):
                pass

    asyncio.run(run())
    recording = read_recording(path)
    assert len(recording.arrivals) == 1
    assert sum(len(step.spans) for step in recording.steps) >= 5


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="max_bytes is 0"):
        RecordTo(path="x", max_bytes=0)
    with pytest.raises(ValueError, match="num_files is 0"):
        replace(RecordTo(path="x"), num_files=0)
