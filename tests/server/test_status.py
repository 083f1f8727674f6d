"""What the server reports about itself, and what happens when its engine dies."""

import asyncio
import json
import os
import signal
import threading
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.engine.engine import Engine
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.process.protocol import Load
from tests import zoo
from tests.server.serving import HELLO, RunningServer, read_until, send
from tests.text.tokenizers_for_tests import byte_level


def test_the_model_is_found_by_any_of_its_names(server: RunningServer) -> None:
    (card,) = server.client.models.list()
    assert (card.id, card.object, card.owned_by) == ("stories", "model", "inflight")
    of_model = {"max_model_len": 1024, "input_modalities": []}
    assert card.model_extra == {**of_model, "root": "stories", "parent": None}
    assert server.client.models.retrieve("inflight/stories") == card
    for name in ("stories", "inflight/stories", None):
        assert server.complete(prompt="a", max_tokens=1, model=name)["model"] == "stories"
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_health_and_version_are_reported(server: RunningServer) -> None:
    server.complete(prompt="a", max_tokens=1)  # this loads the model
    assert server.http.get("/health").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
    for path in ("/health", "/version"):  # as some load balancers ask
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_texts_are_tokenized_and_detokenized(server: RunningServer) -> None:
    def post(path: str, **body: Any) -> Any:
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    answer = post("/tokenize", prompt="Once upon", return_token_strs=True)
    assert answer == {
        "count": 3,
        "max_model_len": 1024,
        "tokens": [0, 467, 496],
        "token_strs": ["<s>", "Once", "Ġupon"],
    }
    assert post("/tokenize", prompt="Once upon", add_special_tokens=False)["tokens"] == [467, 496]
    assert post("/tokenize", prompt="")["count"] == 0
    assert post("/detokenize", tokens=[0, 467, 496])["prompt"] == "<s>Once upon"
    assert post("/detokenize", tokens=[])["prompt"] == ""
    for path, body, message in (
        ("/tokenize", {}, "either prompt or messages must be given"),
        ("/tokenize", {"prompt": 3}, "prompt is 3; it should be a valid string"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message is given with a prompt"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens is True; a chat has only"),
        ("/detokenize", {"tokens": [1536]}, "tokens contains 1536; the model's vocabulary has the ids from 0 to 1535"),
        ("/detokenize", {"tokens": [-1]}, "tokens contains -1"),
    ):
        response = server.http.post(path, json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_when_the_engine_dies_every_request_fails_and_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, engines = threading.Event(), []

    def connect(load: Load) -> ProcessConnection:
        assert may_start.wait(60)
        engines.append(ProcessConnection(load))
        return engines[-1]

    monkeypatch.setattr("inflight.engine.fleet.ProcessConnection", connect)
    with RunningServer(AsyncLLM(num_blocks=2000, restart_delays=(0.0,)), keep_alive_interval=0.05) as server:
        assert server.http.get("/health").status_code == 503  # the engine is still loading
        may_start.set()
        assert server.complete(prompt="a", max_tokens=1)  # a request waits until the engine is loaded
        assert server.http.get("/health").status_code == 200
        may_start.clear()
        os.kill(engines[0].pid, signal.SIGSTOP)  # so that no request finishes
        with server.connection() as streaming, server.connection() as waiting:
            send(streaming, "/v1/completions", prompt=[5], stream=True)
            send(waiting, "/v1/completions", prompt=[5])
            read_until(streaming, b": keep-alive")
            server.wait_for_calls(2)
            os.kill(engines[0].pid, signal.SIGKILL)
            answer = read_until(streaming, b"\r\n0\r\n\r\n")
            last = json.loads(answer.split(b"data: ")[-1].split(b"\n\n")[0])
            assert last["error"]["code"] == "engine_dead"
            assert last["error"]["message"] == "the engine was killed by SIGKILL"
            answer = read_until(waiting, b"}}")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer.lower()
        response = server.http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine is loading"
        may_start.set()
        assert server.complete(prompt="a", max_tokens=1)
        assert server.http.get("/health").status_code == 200
        server.check_idle()
        assert server.observer.take_reasons() == ["length", "error", "error", "length"]
        assert asyncio.run(server.llm.stats()).num_crashes == 1


def test_an_engine_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise KeyError("lost")

    llm = AsyncLLM(zoo.build("gpt2"), byte_level().inner, in_process=True, restart_delays=())
    with RunningServer(llm) as server:
        assert server.complete(prompt="a", max_tokens=1)
        monkeypatch.setattr(Engine, "step", broken)
        ask = {"prompt": "a", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=ask).status_code == 503
        for answer in (server.http.get("/health"), server.http.post("/v1/completions", json=ask)):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert "1 times in a row" in answer.json()["error"]["message"]


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    with RunningServer(AsyncLLM(zoo.build("gpt2"), in_process=True)) as server:
        (choice,) = server.complete(prompt=[5, 6], max_tokens=3, return_token_ids=True, logprobs=1, echo=True)[
            "choices"
        ]
        assert choice["text"] == ""
        assert len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"][0] == "token_id:5"
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            response = server.http.post(path, json=body)
            assert response.status_code == 400
            assert "no tokenizer" in response.json()["error"]["message"]
