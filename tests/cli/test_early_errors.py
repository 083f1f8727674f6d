"""Missing libraries and wrong options are reported before the work starts."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules['matplotlib.figure'] = None; from inflight.cli import main; main()"


@pytest.mark.parametrize(
    "arguments",
    [
        ("race", "--html", "race.html", "-m", "./nope"),
        ("race", "--png", "race.png", "-m", "./nope"),
        ("trace", "nope.jsonl", "--png", "run.png"),
        ("profile", "-m", "./nope", "--png", "profile.png"),
        ("show", "Once", "-m", "./nope", "--png", "step.png"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
@pytest.mark.thorough("race", "trace")
def test_missing_matplotlib_is_said_before_anything_else(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "nope.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "pictures need matplotlib" in done.stderr
    assert "nope" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.thorough
def test_a_wrong_sampling_option_is_said_before_the_model_is_looked_for(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "inflight", command, "-m", "./nope", "--temperature", "-1"]
    given = ["Once"] if command == "generate" else []
    done = subprocess.run([*arguments, *given], cwd=tmp_path, input="", capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "temperature is -1" in done.stderr
    assert "nope" not in done.stderr
