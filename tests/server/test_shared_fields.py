"""Fields that only some APIs' documents have are taken by all of them, and reach the engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import SamplingParams
from tests.server.chat_format.scripted import prompt_of, say, scripted_server
from tests.server.serving import HELLO, RunningServer

ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "A story, please.", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}
FIELDS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"42": -5},
    "bad_words": ["fox"],
    "seed": 11,
    "min_tokens": 1,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "speculation": False,
}


@pytest.mark.parametrize("path", ASK)
def test_every_api_takes_all_sampling_fields(
    shared_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen: list[SamplingParams] = []
    started = shared_server.observer.started

    def watch(request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        seen.append(params)
        started(request_id, num_sequences, params)

    monkeypatch.setattr(shared_server.observer, "started", watch)
    more = {"priority": 3, "cache_salt": "me"}
    response = shared_server.http.post(path, json={**ASK[path], **FIELDS, **more})
    assert response.status_code == 200, response.text
    assert "x-inflight-ignored-fields" not in response.headers
    (params,) = seen
    for name, value in FIELDS.items():
        expected = {42: -5.0} if name == "logit_bias" else value
        assert getattr(params, name) == expected, name


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_stop_strings_end_an_answer(shared_server: RunningServer, path: str) -> None:
    limit = next(name for name in ASK[path] if name.startswith("max"))
    answer = shared_server.http.post(path, json={**ASK[path], limit: 60, "temperature": 0, "stop": ["."]}).json()
    text = (
        answer["choices"][0]["message"]["content"] if "choices" in answer else answer["output"][0]["content"][0]["text"]
    )
    assert text
    assert "." not in text


@pytest.mark.parametrize("path", ASK)
def test_a_seed_gives_the_same_answer_again(shared_server: RunningServer, path: str) -> None:
    limit = next(name for name in ASK[path] if name.startswith("max"))
    asked = {**ASK[path], limit: 20, "seed": 5, "temperature": 1.0}
    first, second = (shared_server.http.post(path, json=asked).json() for _ in range(2))
    texts = [
        answer.get("choices") or answer.get("content") or answer["output"][0]["content"] for answer in (first, second)
    ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def moody() -> Iterator[RunningServer]:
    with scripted_server("{{ messages[0].content }} {{ mood }}") as server:
        say(server, "Yes.")
        yield server


@pytest.mark.parametrize("path", ASK)
def test_every_api_passes_variables_to_the_chat_template(moody: RunningServer, path: str) -> None:
    asked = {**ASK[path], "chat_template_kwargs": {"mood": "merry"}}
    response = moody.http.post(path, json=asked)
    assert response.status_code == 200, response.text
    assert prompt_of(moody).endswith(" merry")
    asked["chat_template_kwargs"] = {"messages": []}
    refused = moody.http.post(path, json=asked)
    assert refused.status_code == 400
    assert "which is not a variable of the template" in refused.text
