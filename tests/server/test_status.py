"""What the server says about itself, and what becomes of it when its engine dies."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.engine_process.connection import ProcessConnection
from tests.server.serving import HELLO, RunningServer, raw_request, read_until


def test_the_model_by_any_of_its_names(server: RunningServer) -> None:
    (card,) = server.client.models.list()
    assert (card.id, card.object, card.owned_by) == ("stories", "model", "inflight")
    assert card.model_extra == {"max_model_len": 1024}
    assert server.client.models.retrieve("inflight/stories") == card
    for name in ("stories", "inflight/stories", None):
        assert server.complete(prompt="a", max_tokens=1, model=name)["model"] == "stories"
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_health_and_version(server: RunningServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}


def test_tokens_of_texts_and_back(server: RunningServer) -> None:
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
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens is True; a chat has those"),
        ("/detokenize", {"tokens": [1536]}, "tokens contains 1536; the model's vocabulary has the ids from 0 to 1535"),
        ("/detokenize", {"tokens": [-1]}, "tokens contains -1"),
    ):
        response = server.http.post(path, json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def kill_engine(llm: AsyncLLM) -> None:
    session = llm._supervisor._session
    assert session is not None
    assert isinstance(session._connection, ProcessConnection)
    os.kill(session._connection.pid, signal.SIGKILL)


def test_when_the_engine_dies_everybody_hears_and_it_comes_back_by_itself() -> None:
    with RunningServer(AsyncLLM(num_blocks=2000)) as server:
        assert server.http.get("/health").status_code == 503  # it is still loading
        assert server.complete(prompt="a", max_tokens=1)  # which a request waits for
        assert server.http.get("/health").status_code == 200
        body = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True}
        with server.connection() as streaming, server.connection() as waiting:
            streaming.sendall(raw_request("/v1/completions", json.dumps({**body, "stream": True}).encode()))
            waiting.sendall(raw_request("/v1/completions", json.dumps(body).encode()))
            read_until(streaming, b"data: ")
            while len(server.observer.running) < 2:
                pass
            kill_engine(server.llm)
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
        assert server.complete(prompt="a", max_tokens=1)
        assert server.http.get("/health").status_code == 200
        server.check_idle()
        assert server.observer.take_reasons() == ["length", "error", "error", "length"]
        assert asyncio.run(server.llm.stats()).num_crashes == 1


def test_an_engine_that_can_not_be_had_is_said_to_be_so() -> None:
    with RunningServer(AsyncLLM(restart_delays=())) as server:
        assert server.complete(prompt="a", max_tokens=1)
        kill_engine(server.llm)
        while (response := server.http.get("/health")).status_code == 200:
            pass
        for answer in (response, server.http.post("/v1/completions", json={"prompt": "a"})):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert "1 times in a row" in answer.json()["error"]["message"]


def test_a_model_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import zoo

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
