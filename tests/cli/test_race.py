"""`inflight race` and `inflight bench`, as a user runs them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from inflight.cli import app


def test_a_race_ends_with_a_table_a_page_and_a_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "race.html", tmp_path / "race.png"
    arguments = ["race", "--requests", "6", "--max-tokens", "12", "--max-num-seqs", "3", "--verbose"]
    done = CliRunner().invoke(app, [*arguments, "--html", str(page), "--png", str(picture)])
    assert done.exit_code == 0, done.output
    assert "All methods gave the same tokens." in done.stdout
    assert "slot 2 <- req 2 (" in done.stderr
    assert "--- barrier" in done.stderr
    assert "tokens useful" in done.stderr
    assert page.read_text().count("<svg") == 1
    assert picture.stat().st_size > 10_000


def test_a_race_can_be_limited_to_some_methods() -> None:
    done = CliRunner().invoke(app, ["race", "--requests", "3", "--max-tokens", "4", "--method", "engine"])
    assert done.exit_code == 0, done.output
    assert "engine" in done.stdout
    assert "static" not in done.stdout


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    arguments = ["race", "--requests", "2", "--max-tokens", "2", "--png", str(tmp_path / "no" / "race.png")]
    with pytest.raises(ValueError, match="cannot be written"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
