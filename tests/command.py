"""Fixtures that run the command in the tests' own process, because starting another process takes seconds."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeAlias

import pytest
from transformers.utils import logging as transformers_logging

from inflight.cli import main

ENVIRONMENT = {"COLUMNS": "120", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""The width of printed output, and what the command would set for its process."""


class Done(NamedTuple):
    """How the command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Command: TypeAlias = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command with arguments, standard input, and environment variables in addition to those of the tests."""

    def run(*arguments: object, stdin: str = "", **variables: str) -> Done:
        with TemporaryFile("w+") as file, _without_bars(), monkeypatch.context() as patch:
            file.write(stdin)
            file.seek(0)
            patch.setattr(sys, "argv", ["inflight", *map(str, arguments)])
            patch.setattr(sys, "stdin", file)
            patch.setattr(logging.root, "handlers", [])  # as they are before the command sets up its own
            for name, value in (ENVIRONMENT | variables).items():
                patch.setenv(name, value)
            capfd.readouterr()
            code: Any = 0
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            return Done(code, *capfd.readouterr())

    return run


@contextmanager
def _without_bars() -> Iterator[None]:
    """As in a process that starts without a terminal."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@pytest.fixture
def refused(command: Command) -> Command:
    """Runs the command with a caller's mistake, and expects exit code 2."""

    def run(*arguments: object, **options: str) -> Done:
        done = command(*arguments, **options)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done

    return run
