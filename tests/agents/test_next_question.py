"""What the server computes between an answer and the next question, and when it does not."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.contracts.api.config import BACKGROUND
from tests.agents.puppet import Puppet, puppet_server
from tests.agents.session_tokens import TOOL
from tests.agents.test_session_tokens import FORGETFUL
from tests.server.serving import RunningServer

THOUGHTS = "I think about it for long, and about many other things that are not in the answer. " * 4
HISTORY = [
    {"role": "user", "content": "Read the file."},
    {"role": "assistant", "content": "I read it.", "reasoning_content": THOUGHTS},
    {"role": "tool", "tool_call_id": "a", "content": "A line. " * 40},
]


class Held(Puppet):
    """Its work in the background runs until it is cancelled."""

    num_begun = 0
    was_cancelled: threading.Event

    async def stream(self, prompt: Any, params: Any = None, request_id: Any = None, **options: Any) -> Any:  # type: ignore[override]
        if options.get("priority") != BACKGROUND:
            async for delta in super().stream(prompt, params, request_id, **options):
                yield delta
            return
        self.num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled.set()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with puppet_server(Held) as server:
        assert server.llm.tokenizer is not None
        server.llm.tokenizer.inner.chat_template = FORGETFUL
        yield server


def ask(server: RunningServer, text: str, history: list[dict[str, Any]], **options: Any) -> Held:
    assert isinstance(server.llm, Held)
    server.llm.was_cancelled, server.llm.num_begun = threading.Event(), 0
    server.llm.play([text], mark="")
    response = server.http.post("/v1/chat/completions", json={"messages": history, "tools": [TOOL], **options})
    assert response.status_code == 200, response.text
    return server.llm


@pytest.mark.parametrize("stream", [False, True])
def test_another_request_ends_the_work(server: RunningServer, stream: bool) -> None:
    llm = ask(server, "It has a line.", HISTORY, stream=stream)
    while not llm.num_begun:
        assert server.app.state.service.idle_work
        time.sleep(0.001)
    assert not llm.was_cancelled.is_set()
    server.complete(prompt="a", max_tokens=1)
    assert llm.was_cancelled.wait(60)
    server.wait_for_idle_work()


@pytest.mark.parametrize(
    ("text", "history", "options"),
    [
        ('<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>', HISTORY, {}),
        ("It has a line.", [{**each, "reasoning_content": ""} for each in HISTORY], {}),
        ("It has a line.", HISTORY[:1], {}),
        ("It has a line.", [*HISTORY, {"role": "user", "content": "What is in it?"}], {}),
        ("It has a line.", HISTORY, {"n": 2}),
        ("It has a line.", HISTORY, {"truncate_prompt_tokens": 40}),
        (" has a line.", [*HISTORY, {"role": "assistant", "content": "It"}], {"continue_final_message": True}),
    ],
    ids=["calls", "no reasoning", "a first question", "a question since", "two answers", "a part", "a begun answer"],
)
def test_nothing_is_computed_for(
    text: str, history: list[dict[str, Any]], options: dict[str, Any], server: RunningServer
) -> None:
    llm = ask(server, text, history, **options)
    server.wait_for_idle_work()
    assert llm.num_begun == 0


def test_nothing_is_computed_beside_other_requests(server: RunningServer) -> None:
    service = server.app.state.service
    service.running["another"] = None
    try:
        llm = ask(server, "It has a line.", HISTORY)
    finally:
        del service.running["another"]
    server.wait_for_idle_work()
    assert llm.num_begun == 0
