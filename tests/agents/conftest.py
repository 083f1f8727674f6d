"""A server with scripted answers. Telemetry of the agent packages is disabled before they are imported."""

import os
from collections.abc import Iterator

os.environ |= {
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or else it is fetched
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}

import pytest

from tests.agents.turns import Weather, plan, server_of_turns
from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def server_of_module() -> Iterator[RunningServer]:
    with server_of_turns() as server:
        yield server


@pytest.fixture
def server(server_of_module: RunningServer) -> Iterator[RunningServer]:
    """The module's server, idle after the test."""
    plan(server_of_module)
    yield server_of_module
    server_of_module.check_idle()


@pytest.fixture
def weather() -> Weather:
    return Weather()
