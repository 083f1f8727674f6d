"""The embedded model with a template that tells it of tools, saying what tests want."""

from collections.abc import Iterator

import pytest

from tests.server.serving import RunningServer
from tests.server.tools.scripted import HERMES_TEMPLATE, ScriptedLLM


@pytest.fixture(scope="package")
def hermes_server() -> Iterator[RunningServer]:
    llm = ScriptedLLM(num_blocks=2000, in_process=True)
    llm.tokenizer.inner.chat_template = HERMES_TEMPLATE  # type: ignore[union-attr]
    with RunningServer(llm, model_name="stories") as server:
        yield server


@pytest.fixture
def hermes(hermes_server: RunningServer) -> Iterator[RunningServer]:
    assert isinstance(hermes_server.llm, ScriptedLLM)
    hermes_server.llm.script = None
    yield hermes_server
    hermes_server.check_idle()
