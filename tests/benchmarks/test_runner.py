"""A runner answers requests, and every failure is reported in words."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers.protocol import RunnerError, Settings, family
from benchmarks.peers.runner import Runner
from benchmarks.workloads import WORKLOADS, Request

COMMAND = [sys.executable, "-m", "tests.benchmarks.fake_peer"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="runners account for memory as Linux does")


def settings(model: str = "fine") -> Settings:
    return Settings(model, "float32", None, num_slots=8, num_threads=1, max_model_len=128)


def test_a_runner_completes_a_round(tmp_path: Path) -> None:
    requests = WORKLOADS["W1"].requests(0)
    with Runner(COMMAND, settings(), tmp_path / "logs" / "fake.log") as runner:
        assert runner.loaded.options == {"slots": 8}
        assert runner.loaded.versions["python"].startswith("3.")
        assert runner.loaded.versions["a-package-that-nobody-has"] == "not installed"
        assert min(runner.loaded.memory_after_import, runner.loaded.memory_after_load) > 1 << 20
        for _ in range(2):
            measured = runner.run(requests)
            assert [each.num_output_tokens for each in measured.requests] == [r.num_output_tokens for r in requests]
            assert all(0.2 < each.first_token_seconds < each.seconds for each in measured.requests)
            assert measured.seconds > 0
            assert measured.peak_memory > 1 << 20
    assert "a library that talks" in (tmp_path / "logs" / "fake.log").read_text()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_runner_is_suspended_between_turns_and_gone_at_the_end(tmp_path: Path) -> None:
    with Runner(COMMAND, settings(), tmp_path / "log") as runner:
        (process,) = set(family(os.getpid())) & {runner._process.pid}
        runner.run([Request([1], 1)])
        while state_of(process) != "T":  # a signal takes some time
            pass
    assert not Path(f"/proc/{process}").exists()
    runner.close()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("stops early", r"other numbers of tokens than asked for: 99 for 100, 9 for 10"),
        ("dies", r"ended with status 1: out of luck"),
    ],
)
def test_a_failed_run_is_reported(model: str, message: str, tmp_path: Path) -> None:
    with (
        Runner(COMMAND, settings(model), tmp_path / "log") as runner,
        pytest.raises(RunnerError, match=message),
    ):
        runner.run(WORKLOADS["W1"].requests(0))


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="there is no such model"):
        Runner(COMMAND, settings("missing"), tmp_path / "log")


def test_a_runner_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="No module named"):
        Runner([sys.executable, "-m", "benchmarks.peers.nobody"], settings(), tmp_path / "log")
