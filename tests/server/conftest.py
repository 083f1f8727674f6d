"""The embedded model with and without a server, each shared by all tests that leave it unchanged."""

from collections.abc import Iterator

import pytest

from inflight import LLM, AsyncLLM
from inflight.server.wire import json_route
from inflight.server.wire.strict_model import RequestParsing
from tests.server.serving import RunningServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with RunningServer(
        AsyncLLM(num_blocks=2000, restart_delays=(0.0, 0.0)),
        model_name="stories",
        model_aliases=("inflight/stories",),
        max_n=8,
        max_num_sequences=16,
        max_logprobs=5,
    ) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, idle before and after the test."""
    shared_server.observer.take_reasons()
    yield shared_server
    shared_server.check_idle()


@pytest.fixture(scope="session")
def offline() -> LLM:
    return LLM()


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers refuse all fields that they do not know or support, as with `strict`."""
    monkeypatch.setattr(json_route, "RequestParsing", lambda *_: RequestParsing(is_strict=True))
