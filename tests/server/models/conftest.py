"""Three models on the disk, and a server of them that most tests share."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.server.models import served
from tests.server.models.serving import RunningModels, save_models


class Gates:
    """Loads and ends of models wait here while they are closed."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], threading.Event] = {}

    def close(self, what: str, model: str) -> threading.Event:
        """Let the next ones wait until the event is set. `what` is "load" or "stop"."""
        self._open[what, model] = threading.Event()
        return self._open[what, model]

    def wait(self, what: str, model: str) -> None:
        """Return once there is no gate, or an open one."""
        if (gate := self._open.get((what, model))) is not None:
            assert gate.wait(60)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    gates = Gates()

    class GatedLLM(AsyncLLM):
        def __init__(self, model: str, **options: Any) -> None:
            gates.wait("load", model)
            super().__init__(model, **options)
            self._gated = model

        async def stop(self) -> None:
            await asyncio.to_thread(gates.wait, "stop", self._gated)
            await super().stop()

    monkeypatch.setattr(served, "AsyncLLM", GatedLLM)
    return gates


@pytest.fixture(scope="session")
def shared_models(folders: dict[str, str]) -> Iterator[RunningModels]:
    with RunningModels(folders, max_loaded_models=2) as server:
        yield server


@pytest.fixture
def models(shared_models: RunningModels) -> Iterator[RunningModels]:
    """The shared server, idle before and after the test."""
    yield shared_models
    shared_models.wait_until_unused()
