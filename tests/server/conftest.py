"""The embedded model served, and the same without a server: each once for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from inflight import LLM, AsyncLLM
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
    """Idle before and after the test."""
    shared_server.observer.take_reasons()
    yield shared_server
    shared_server.check_idle()


@pytest.fixture(scope="session")
def offline() -> LLM:
    return LLM()
