"""Several models behind one port: every endpoint reaches the model that a request names, over real HTTP."""

from typing import Any

import pytest
from schemathesis import GenerationMode

from tests.server.models.serving import MODELS, RunningModels, events_of, expected
from tests.server.test_schema import ask_anything

CHAT: Any = [{"role": "user", "content": "The fox"}]
GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.mark.parametrize("name", MODELS)
def test_each_endpoint_reaches_the_model_that_is_named(models: RunningModels, name: str) -> None:
    def ids(**what: Any) -> list[int]:
        answer: list[int] = models.post("/tokenize", model=name, **what)["tokens"]
        return answer

    of_text, of_chat = expected(name, ids(prompt="The fox"), 4), expected(name, ids(messages=CHAT), 4)
    client = models.client
    completion = client.completions.create(model=name, prompt="The fox", max_tokens=4, **GREEDY)
    assert (completion.model, completion.choices[0].text) == (name, of_text)
    chat: Any = client.chat.completions.create(model=name, messages=CHAT, max_tokens=4, **GREEDY)
    assert (chat.model, chat.choices[0].message.content) == (name, of_chat)
    chunks = list(client.completions.create(model=name, prompt="The fox", max_tokens=4, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == of_text
    assert {chunk.model for chunk in chunks} == {name}
    response = client.responses.create(model=name, input="The fox", max_output_tokens=16, **GREEDY)
    assert (response.model, response.output_text) == (name, expected(name, ids(messages=CHAT), 16))
    assert client.responses.retrieve(response.id).output_text == response.output_text
    message = models.post("/v1/messages", model=name, messages=CHAT, max_tokens=4, **GREEDY)
    assert (message["model"], message["content"][0]["text"]) == (name, of_chat)
    counted = models.post("/v1/messages/count_tokens", model=name, messages=CHAT)
    assert counted["input_tokens"] == len(ids(messages=CHAT))
    assert models.post("/detokenize", model=name, tokens=ids(prompt="The fox"))["prompt"] == "<s>The fox"
    info = models.http.get("/tokenizer_info", params={"model": name})
    assert info.json()["tokenizer_class"]


def test_answers_of_the_three_differ(models: RunningModels) -> None:
    prompt = list(range(5, 15))
    assert len({expected(name, prompt, 8) for name in MODELS}) == 3  # or the test above would say little


def test_a_conversation_goes_on_with_another_model(models: RunningModels) -> None:
    first = models.client.responses.create(model="red", input="The fox", max_output_tokens=16, **GREEDY)
    for name in ("green", "blue"):  # so that the first one was unloaded
        models.complete(name)
    assert models.states["red"] == "unloaded"
    second = models.client.responses.create(
        model="blue", input="The dog", previous_response_id=first.id, max_output_tokens=16, **GREEDY
    )
    chat = [*CHAT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "The dog"}]
    token_ids = models.post("/tokenize", model="blue", messages=chat)["tokens"]
    assert second.output_text == expected("blue", token_ids, 16)
    models.client.responses.delete(first.id)


def test_a_conversation_and_its_responses_in_the_background_are_of_all_models(models: RunningModels) -> None:
    client, texts = models.client, []
    conversation = client.conversations.create().id
    for name in ("red", "green"):
        answer = client.responses.create(
            model=name, input="The fox", conversation=conversation, background=True, max_output_tokens=16, **GREEDY
        )
        while answer.status in ("queued", "in_progress"):
            answer = client.responses.retrieve(answer.id)
        texts.append(answer.output_text)
    items: list[Any] = list(client.conversations.items.list(conversation, order="asc"))
    assert [item.content[0].text for item in items] == ["The fox", texts[0], "The fox", texts[1]]


def test_the_least_recently_used_goes_when_there_are_too_many(models: RunningModels) -> None:
    for name in ("red", "green"):
        models.complete(name)
    assert models.states == {"red": "loaded", "green": "loaded", "blue": "unloaded"}
    models.complete("red")
    models.complete("blue")
    assert models.states == {"red": "loaded", "green": "unloaded", "blue": "loaded"}


def test_memory_decides_how_many_are_loaded(folders: dict[str, str]) -> None:
    with RunningModels(folders, max_loaded_memory=1) as server:
        for name in MODELS:
            server.complete(name)
            assert server.states == {each: "loaded" if each == name else "unloaded" for each in MODELS}


def test_the_list_says_what_is_known_of_each_model(models: RunningModels) -> None:
    models.complete("red")
    cards = {card.id: card for card in models.client.models.list()}
    assert list(cards) == list(MODELS)
    assert cards["red"].owned_by == "inflight"
    of_model = {"max_model_len": 1024, "input_modalities": []}
    assert cards["red"].model_extra == {**of_model, "parent": None, "status": {"value": "loaded"}}
    assert models.client.models.retrieve("red") == cards["red"]
    assert models.http.get("/health").status_code == 200
    assert set(models.http.get("/version").json()) == {"version"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{}", 400, "model is missing; this server has 'red', 'green', 'blue'"),
        (b'{"model": null}', 400, "model is missing"),
        (b'{"model": "other"}', 404, "there is no model 'other'; this server has 'red', 'green', 'blue'"),
        (b'{"model": 3}', 400, "model is 3; it should be a valid string"),
        (b'{"model": ["red"]}', 400, "it should be a valid string"),
        (b'{"model": "red"', 400, "the body is not JSON: "),
        (b"", 400, "the body is empty; it must be a JSON object"),
        (b"[1]", 400, "the body must be a JSON object"),
        (b'{"model": "\\ud800"}', 400, "the body is not JSON: "),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_request_that_names_no_model_is_refused(
    models: RunningModels, path: str, body: bytes, status: int, message: str
) -> None:
    answer = models.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages")  # Anthropic's envelope


def test_other_requests_are_answered_as_by_a_server_of_one_model(models: RunningModels) -> None:
    assert models.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert models.http.get("/v1/completions").status_code == 405
    assert models.http.get("/v1/files").json()["error"]["code"] == "batches_not_enabled"
    assert models.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert models.http.get("/tokenizer_info").status_code == 400
    document = models.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "prompt" in document["components"]["schemas"]["CompletionRequest"]["properties"]
    answer = models.http.post("/v1/completions", json={"model": "red", "prompt": "a", "max_tokens": 1, "new_hint": 1})
    assert answer.headers["x-inflight-ignored-fields"] == "new_hint"
    assert answer.headers["x-request-id"]


def test_one_model_needs_no_name(folders: dict[str, str]) -> None:
    with RunningModels({"red": folders["red"]}, idle_unload=1000) as server:
        assert server.complete()["model"] == "red"
        assert server.complete("red")["model"] == "red"
        assert "there is no model 'blue'" in server.complete("blue", 404)["error"]["message"]


def test_no_input_is_the_servers_fault(folders: dict[str, str]) -> None:
    """What is right is handed on, and tried with one model (`test_schema`)."""
    with RunningModels({"red": folders["red"]}, idle_unload=1000) as server:
        ask_anything(server.url, GenerationMode.NEGATIVE)
        server.wait_until_unused()


def test_metrics_have_the_names_of_models_and_go_on_counting(models: RunningModels) -> None:
    for name in MODELS:
        models.complete(name)
    before = models.samples
    for name in MODELS:
        models.complete(name)  # each load is a new one
    models.http.post("/v1/completions", json={"prompt": "a"})
    after = models.samples
    for name in MODELS:
        for metric, added in (
            (("vllm:generation_tokens_total", "0", name), 3),
            (("vllm:request_success_total", "length", name), 1),
            (("inflight:http_requests_total", "POST", name, "/v1/completions", "200"), 1),
            (("inflight:model_loads_total", name), 1),
            (("inflight:model_unloads_total", name), 1),
        ):
            assert after[metric] - before[metric] == added, metric
    states = {name: after["inflight:model_state", name, "loaded"] for name in MODELS}
    assert sorted(states.values()) == [0, 1, 1]
    assert {name for name, state in models.states.items() if state == "loaded"} == {n for n in states if states[n]}
    assert after["inflight:http_requests_total", "POST", "", "/v1/completions", "400"] >= 1
    assert after["inflight:model_load_seconds", "red"] > 0
    for name, is_loaded in states.items():  # alerts must not report an unused model as dead
        assert after.get(("inflight:engine_up", "0", name)) == (1.0 if is_loaded else None)
        assert (("vllm:num_requests_running", "0", name) in after) == is_loaded
    text = models.http.get("/metrics").text
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1
    assert text.count("# TYPE process_resident_memory_bytes ") == 1


def test_a_stream_of_events_is_that_of_one_model(models: RunningModels) -> None:
    with models.http.stream(
        "POST", "/v1/messages", json={"model": "red", "messages": CHAT, "max_tokens": 3, "stream": True}
    ) as stream:
        text = stream.read().decode()
    kinds = [event["type"] for event in events_of(text)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
