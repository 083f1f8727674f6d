"""The trial of what is written for GPUs, on a CPU: every stage runs, and failures and cuts leave what was reached."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_trial
from benchmarks.gpu_trial import Trial, lines_of, run_stage


@pytest.mark.skipif("INFLIGHT_TEST_TRIAL" not in os.environ, reason="takes a minute and a half; make soak runs it")
def test_every_stage_runs_on_a_cpu_in_one_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_trial", "--device", "cpu", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout
    found = {(each["stage"], each["result"]) for each in results}
    assert found >= {(stage, "passed") for stage in ("machine", "exactness", "invariance", "speed")}
    assert [each["name"] for each in results if each["stage"] == "speed"] == [
        f"{name}, W1" for name in ("inflight", "hf-static", "hf-continuous")
    ]
    assert (tmp_path / "table.md").read_text().strip() in done.stdout


@pytest.mark.thorough
def test_a_failure_has_its_traceback_in_a_file_and_the_trial_goes_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "nowhere", 600, is_quick=True)
    run_stage(trial, "machine")
    run_stage(trial, "exactness")
    failed = [each for each in trial.outcomes if each.result == "failed"]
    assert {each.stage for each in failed} == {"machine", "exactness"}
    assert "nowhere" in failed[-1].figure
    files = sorted((tmp_path / "failures").iterdir())
    assert len(files) == len(failed)
    assert all("Traceback" in each.read_text() for each in files)


def test_what_was_reached_before_the_end_of_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []

    class Held:
        """A timer that goes off when the test says so."""

        def __init__(self, seconds: float, call: Callable[[], None]) -> None:
            timers.append(call)

        def start(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr(gpu_trial.threading, "Timer", Held)
    trial = Trial(tmp_path, "cpu", 600, is_quick=True)
    endless = "import signal; print('one', flush=True); signal.pause()"
    lines = lines_of(trial, "exactness", [sys.executable, "-c", endless])
    assert next(lines) == "one\n"
    timers[0]()
    assert list(lines) == []
    (cut,) = json.loads((tmp_path / "results.json").read_text())
    assert cut["result"] == "cut"
    assert "| exactness | 0 | 0 | 0 | 1 |" in trial.table()
