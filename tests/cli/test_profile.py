"""`inflight profile`, as a user runs it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from inflight.cli import app
from tests.command import Command

SAMPLED = ("--temperature", 0.8, "--top-k", 5)


def test_the_profile_is_a_table_a_picture_and_json(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, values = tmp_path / "profile.png", tmp_path / "profile.json"
    done = command("profile", "--num-seqs", 2, "--context", 20, "--steps", 1, *SAMPLED, "--png", png, "--json", values)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("linears", "attention", "small operators", "sampler", "scheduler", "weights and cache read once"):
        assert word in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(values.read_text())["parts"]) == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--num-seqs", "0"], "0 is not in the range"), (["--png", "/"], "is a directory")],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["profile", *arguments])
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_too_few_slots_are_refused() -> None:
    done = CliRunner().invoke(app, ["profile", "--max-num-seqs", "4"])
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == "8 sequences do not run at once: the engine has 4 slots"
