"""A large request does not block others: work that grows with its size is bounded, and runs outside the event loop."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.server.serving import service as services
from inflight.server.wire import json_route
from inflight.server.wire.off_loop import SMALL, Workers
from inflight.text.tokenizer import Tokenizer
from tests.server.serving import HELLO, RunningServer, raw_request

LONG = "fox " * SMALL
TOOL = {"type": "function", "function": {"name": "look", "description": LONG}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": json.dumps({"what": LONG})}}
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "a long text": ("/v1/completions", {"prompt": LONG}),
    "many texts": ("/v1/completions", {"prompt": ["fox"] * SMALL}),
    "a long message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "a long description of a tool": ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL]}),
    "long arguments of a call": (
        "/v1/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    ),
    "a long input": ("/v1/responses", {"input": LONG}),
    "a long turn": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]}),
    "a long text to count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "a long text to tokenize": ("/tokenize", {"prompt": LONG}),
    "many tokens": ("/detokenize", {"tokens": [7] * SMALL}),
}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[str]]:
    """The names of the threads in which a function is called while the block runs."""
    names: list[str] = []
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield names


@pytest.mark.parametrize("what", list(LARGE))
def test_a_large_body_is_read_and_tokenized_beside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, body = LARGE[what]
    server.complete(prompt="Once", max_tokens=1)  # the server has started, and has warmed up its tokenizer
    with (
        watched(monkeypatch, json_route._JsonRequest, "_read") as read,
        watched(monkeypatch, Tokenizer, "render_chat") as written,
        watched(monkeypatch, Tokenizer, "encode") as encoded,
        watched(monkeypatch, Tokenizer, "decode") as decoded,
    ):
        server.http.post(path, json=body)
    used = {*read, *written, *encoded, *(decoded if path == "/detokenize" else ())}
    assert used == {"inflight: large requests"}


def test_a_small_body_is_not_worth_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch, Tokenizer, "encode") as encoded:
        server.complete(prompt="Once upon a time", max_tokens=1)
    assert encoded == [server._thread.name]


def test_a_large_answer_is_built_beside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight.server.openai import logprobs
    from inflight.text.collector import Collector

    with (
        watched(monkeypatch, logprobs, "of_completion") as built,
        watched(monkeypatch, Collector, "take_in") as taken,
    ):
        server.complete(prompt=[[5, *range(100, 200)]], max_tokens=0, echo=True, logprobs=5)
    assert set(built) == {"inflight: large requests"}
    assert taken[0].startswith("inflight: beside the event loop")


@pytest.mark.parametrize(
    "body", ["[" * 31, '{"prompt": [' + "{}," * 23, '{"prompt": "' + "," * 90, '{"a": {' + '"a": 1, ' * 30]
)
def test_very_many_values_are_refused_before_they_are_parsed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(json_route, "MAX_VALUES", 90)
    with watched(monkeypatch, json_route.msgspec.json, "decode") as parsed:
        answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, parsed) == (400, [])
    assert "more than 90 values" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 65),
        ("stop", ["a" * 1000 + str(number) for number in range(17)]),
        ("stop_token_ids", [1] * 4097),
        ("logit_bias", {str(number): 1 for number in range(4097)}),
        ("bad_words", ["a"] * 1025),
        ("metadata", {str(number): "" for number in range(1025)}),
    ],
)
def test_long_lists_are_refused(server: RunningServer, field: str, value: object) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "Once", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_very_many_log_probabilities_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_SCORES", 8 * 6)
    fits = {"prompt": [[5] * 4] * 2, "max_tokens": 0, "echo": True, "logprobs": 5}
    server.complete(**fits)
    answer = server.http.post("/v1/completions", json={**fits, "prompt": [[5] * 4] * 3})
    assert answer.status_code == 400
    assert "12 prompt tokens with 6 log-probabilities each are 72" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    text = "a" * (1024 * 13 + 1)  # the longest token has 13 characters
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    if path == "/v1/completions":
        body = {"prompt": text}
    elif path == "/v1/responses":
        body = {"input": text}
    with watched(monkeypatch, Tokenizer, "encode") as encoded:
        answer = server.http.post(path, json=body)
    assert (answer.status_code, encoded) == (400, [])
    assert "no text of more than 13312 fits" in answer.json()["error"]["message"]


def test_a_client_that_leaves_takes_its_waiting_work_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held, may_go_on, encoded = threading.Event(), threading.Event(), ""
    original = Tokenizer.encode

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        nonlocal encoded
        encoded += text[0]
        if text.startswith("HOLD"):
            held.set()
            assert may_go_on.wait(60)
        return original(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    workers = Workers(num_threads=1)
    for module in ("openai.completions", "openai.tokenization"):
        monkeypatch.setattr(f"inflight.server.{module}.off_loop", workers.run)
    with RunningServer(AsyncLLM(num_blocks=200)) as server:
        server.complete(prompt="Once", max_tokens=1)
        with server.connection() as first, server.connection() as second:
            first.sendall(raw_request("/tokenize", json.dumps({"prompt": "HOLD" + "a" * SMALL}).encode()))
            assert held.wait(60)
            second.sendall(raw_request("/v1/completions", json.dumps({"prompt": "b" * 2 * SMALL}).encode()))
            wait_until(lambda: workers._waiting.qsize() == 1)
            (_, _, future, _) = workers._waiting.queue[0]
            second.close()
            wait_until(future.cancelled)
            may_go_on.set()
        assert server.http.post("/tokenize", json={"prompt": "c" * 2 * SMALL}).status_code == 200  # after the other
        assert encoded.endswith("Hc")


def test_the_smallest_work_goes_first() -> None:
    async def run() -> list[int]:
        workers, done = Workers(num_threads=1), []
        held, may_go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert may_go_on.wait(60)

        first = asyncio.create_task(workers.run(SMALL + 1, hold))
        assert await asyncio.to_thread(held.wait, 60)
        tasks = [
            asyncio.create_task(workers.run(size, lambda size=size: done.append(size)))
            for size in (3 * SMALL, 9 * SMALL, 2 * SMALL)
        ]
        await asyncio.sleep(0)  # all of them wait now
        may_go_on.set()
        await asyncio.gather(first, *tasks)
        return done

    assert asyncio.run(run()) == [2 * SMALL, 3 * SMALL, 9 * SMALL]


def wait_until(holds: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(60_000):
        if holds():
            return
        event.wait(0.001)
    raise AssertionError("it has not happened within a minute")
