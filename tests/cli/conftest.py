"""The command in the tests' own process, where it would take seconds to begin another."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from inflight.cli import main

Refused: TypeAlias = Callable[..., "pytest.CaptureResult[str]"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """What the command says when it ends with exit code 2."""

    def run(*arguments: str, stdin: str = "") -> "pytest.CaptureResult[str]":
        monkeypatch.setattr(sys, "argv", ["inflight", *arguments])
        (tmp_path / "stdin").write_text(stdin)
        with (tmp_path / "stdin").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code == 2
        return capfd.readouterr()

    return run
