"""`inflight generate --record` and `inflight trace`, as a user runs them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from inflight.cli import app
from inflight.observe.recorder import read_recording
from tests.command import Command


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "run.jsonl"
    arguments = ["generate", "-q", "One day", "Two cats", "--max-tokens", "12", "--max-num-seqs", "1"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(path.with_name("out")), "--record", str(path)])
    assert done.exit_code == 0, done.output
    return path


def test_many_prompts_are_recorded(recording: Path) -> None:
    assert len(read_recording(recording).arrivals) == 2


def test_one_streamed_prompt_is_recorded(command: Command, tmp_path: Path) -> None:
    done = command("generate", "Once upon a time", "--max-tokens", 5, "--record", tmp_path / "run")
    assert done.returncode == 0
    assert [len(step.spans) for step in read_recording(tmp_path / "run").steps] == [1] * 5


def test_a_trace_is_a_table_and_three_files(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"run.{name}" for name in ("chrome", "html", "png")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    done = CliRunner().invoke(app, ["trace", str(recording), *options])
    assert done.exit_code == 0, done.output
    assert "time to first token" in done.stdout
    assert "traceEvents" in json.loads(files["chrome"].read_text())
    assert "inflight: run.jsonl" in files["html"].read_text()
    assert files["png"].stat().st_size > 10_000


def test_without_options_there_is_only_a_table(recording: Path) -> None:
    done = CliRunner().invoke(app, ["trace", str(recording)])
    assert done.exit_code == 0
    assert "24 output" in done.stdout


def test_a_file_that_is_not_a_recording_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(ValueError, match="is not a recording"):
        CliRunner().invoke(app, ["trace", str(tmp_path / "text")], catch_exceptions=False)
