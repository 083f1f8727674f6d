"""Servers with scripted answers, each started once."""

from collections.abc import Iterator

import pytest

from tests.server.chat_format.scripted import HERMES_TEMPLATE, say, scripted_server
from tests.server.serving import RunningServer


@pytest.fixture(scope="package")
def hermes_server() -> Iterator[RunningServer]:
    with scripted_server(HERMES_TEMPLATE) as server:
        yield server


@pytest.fixture(scope="package")
def trusting_server() -> Iterator[RunningServer]:
    with scripted_server(trust_request_chat_template=True) as server:
        yield server


@pytest.fixture
def hermes(hermes_server: RunningServer) -> Iterator[RunningServer]:
    """A server whose template describes tools to the model."""
    yield from unscripted(hermes_server)


@pytest.fixture
def trusting(trusting_server: RunningServer) -> Iterator[RunningServer]:
    """A server whose own template does not support tools, and which accepts a template from the request."""
    yield from unscripted(trusting_server)


def unscripted(server: RunningServer) -> Iterator[RunningServer]:
    """The server without a script before the test, and idle after it."""
    say(server)
    yield server
    server.check_idle()
