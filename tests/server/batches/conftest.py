"""A server with batch jobs, shared by tests that tolerate each other's jobs, and an engine that waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight import AsyncLLM
from tests.server.serving import RunningServer
from tests.stepper import Stepper

MAX_FILE_SIZE = 6_000_000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared server keeps its files and jobs."""
    return tmp_path_factory.mktemp("batches") / "jobs"


@pytest.fixture(scope="session")
def jobs_server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(num_blocks=2000), batch_dir=str(folder), max_file_size=MAX_FILE_SIZE) as server:
        yield server


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Stepper:
    """A tiny model whose steps wait for the test, four requests at a time."""
    return Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)
