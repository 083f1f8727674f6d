"""`/v1/messages` with the `anthropic` client: answers, streams, counts and refusals in Anthropic's format."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from tests import zoo
from tests.server.serving import HELLO, TEMPLATE, RunningServer, read_until, send
from tests.stepper import Stepper
from tests.text.tokenizers_for_tests import byte_level

MESSAGES = "/v1/messages"
NUM_TOKENS = 20
ASKED: dict[str, Any] = {
    "model": "stories",
    "messages": HELLO,
    "max_tokens": NUM_TOKENS,
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def expected(offline: LLM) -> str:
    (output,) = offline.chat([HELLO], SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)  # type: ignore[list-item]
    return output.outputs[0].text


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def async_client_of(server: RunningServer) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_chat_is_answered(server: RunningServer, expected: str) -> None:
    answer = client_of(server).messages.create(**ASKED)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", expected)  # type: ignore[union-attr]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "stories")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == NUM_TOKENS
    num_prompt = client_of(server).messages.count_tokens(model="stories", messages=HELLO).input_tokens  # type: ignore[arg-type]
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == num_prompt > 5


def test_an_answer_ends_at_eos_or_at_a_stop_sequence(server: RunningServer, expected: str) -> None:
    whole = client_of(server).messages.create(**{**ASKED, "max_tokens": 900})
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    stop = expected.split()[4]
    cut = client_of(server).messages.create(**ASKED, stop_sequences=["never said", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == expected[: expected.index(stop)]  # type: ignore[union-attr]


def test_the_prefix_cache_shows_in_the_usage(server: RunningServer) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "Tell me of a bear and a boat. " * 20}]}
    first, second = (client_of(server).messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens > (first.cache_read_input_tokens or 0)
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + (
        first.cache_read_input_tokens or 0
    )


def test_the_events_of_a_stream_are_complete_and_in_order(server: RunningServer, expected: str) -> None:
    body = {key: value for key, value in ASKED.items() if key != "extra_body"}
    stream = server.http.post(MESSAGES, json={**body, "temperature": 0, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in stream.text.removesuffix("\n\n").split("\n\n")]
    told = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(data["delta"]["text"] for _, data in told[3:-3]) == expected
    assert told[0][1]["message"]["content"] == []
    assert told[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] == NUM_TOKENS


def test_streams_as_assembled_by_clients(server: RunningServer, expected: str) -> None:
    stop = expected.split()[4]
    with client_of(server).messages.stream(**ASKED, stop_sequences=[stop]) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == expected[: expected.index(stop)]  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)

    async def check() -> None:
        async with async_client_of(server) as client:
            whole = await client.messages.create(**ASKED)
            async with client.messages.stream(**ASKED) as stream:
                texts = [text async for text in stream.text_stream]
                message = await stream.get_final_message()
        assert whole.content[0].text == message.content[0].text == "".join(texts) == expected  # type: ignore[union-attr]
        assert message.usage.output_tokens == NUM_TOKENS
        assert message.usage.input_tokens > 0

    asyncio.run(check())


def test_the_answer_is_json_of_the_schema(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"fox": {"enum": ["red", "blue"]}}, "required": ["fox"]}
    wanted: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    answer = client_of(server).messages.create(**{**ASKED, "max_tokens": 100}, output_config=wanted)
    assert answer.stop_reason == "end_turn"
    assert json.loads(answer.content[0].text)["fox"] in ("red", "blue")  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[RunningServer]:
    """A server whose model has no EOS and whose template accepts every role."""
    tokenizer = byte_level().inner
    tokenizer.chat_template = TEMPLATE
    with RunningServer(AsyncLLM(zoo.build("gpt2"), tokenizer, in_process=True)) as server:
        yield server


def test_a_full_context_and_a_reached_limit_have_different_reasons(tiny_server: RunningServer) -> None:
    server, body = tiny_server, {"messages": [{"role": "user", "content": "a"}]}
    num_prompt = server.http.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"]
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    for max_tokens, reason in ((context - num_prompt, "max_tokens"), (context, "model_context_window_exceeded")):
        answer = server.http.post(MESSAGES, json={**body, "max_tokens": max_tokens, "temperature": 0}).json()
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == (reason, context - num_prompt)


def test_the_prompt_of_a_chat(tiny_server: RunningServer) -> None:
    server = tiny_server

    def count(**body: Any) -> int:
        response = server.http.post(f"{MESSAGES}/count_tokens", json=body)
        assert response.status_code == 200, response.text
        num_tokens: int = response.json()["input_tokens"]
        return num_tokens

    def of(text: str) -> int:
        tokens = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        return int(tokens["count"])

    blocks = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "two"},
    ]
    ask, reply = {"role": "user", "content": blocks}, {"role": "assistant", "content": "yes and"}
    assert count(messages=[ask]) == of("[u]one\ntwo;[a]")
    assert count(messages=[ask, ask]) == of("[u]one\ntwo\none\ntwo;[a]")
    assert count(messages=[ask], system="Be kind.") == of("[s]Be kind.;[u]one\ntwo;[a]")
    assert count(messages=[ask], system=blocks) == of("[s]one\ntwo;[u]one\ntwo;[a]")
    assert count(messages=[ask, reply]) == of("[u]one\ntwo;[a]yes and")
    assert count(messages=[ask, reply, ask]) == of("[u]one\ntwo;[a]yes and;[u]one\ntwo;[a]")
    harmless = {"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "container": None}
    assert count(messages=[ask], **harmless) == count(messages=[ask])


def test_a_prefilled_answer_is_continued(server: RunningServer, expected: str) -> None:
    """The given part ends with a word, because a space at the end would be a separate token."""
    begun = " ".join(expected.split()[:3])
    chat = [*HELLO, {"role": "assistant", "content": begun}]
    answer = client_of(server).messages.create(**{**ASKED, "messages": chat, "max_tokens": 5})
    assert expected.startswith(begun + answer.content[0].text)  # type: ignore[union-attr]


def refused(server: RunningServer, status: int = 400, path: str = MESSAGES, **body: Any) -> dict[str, Any]:
    """The message of the refusal of a body."""
    response = server.http.post(path, json={"messages": HELLO, "max_tokens": 5, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    assert (list(answer), answer["type"]) == (["type", "error", "request_id"], "error")
    assert list(answer["error"]) == ["type", "message"]
    error: dict[str, Any] = answer["error"]
    return error


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens is None; it should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer from 1"),
        ({"max_tokens": 10**30}, "max_tokens is 1000000000000000000000000000000; it must be"),
        ({"messages": []}, "messages is []; list should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot'; it should be 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "the type is 'image'; this server takes parts of type"),
        (
            {"messages": [{"role": "user", "content": "fox " * 2000}]},
            "this model's maximum context length is 1024 tokens",
        ),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema is missing"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'"),
        ({"temperature": -1}, "temperature is -1.0; it must be a finite number of at least 0"),
        ({"top_p": 0}, "top_p is 0.0; it must be a number above 0 and at most 1"),
        ({"top_k": -5}, "top_k is -5; it must be"),
        ({"stop_sequences": [""]}, "stop_sequences[0] is ''; string should have at least 1 character"),
        ({"stop_sequences": ["a"] * 65}, "list should have at most 64 items"),
        ({"stopsequences": ["a"]}, "there is no field 'stopsequences'; did you mean 'stop_sequences'?"),
        ({"output_config": {"effort": 3}}, "output_config.effort is 3"),
        ({"output_config": {"format": {"type": "json_schema", "schem": {}}}}, "output_config.format.schem"),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_bad_bodies_are_refused(server: RunningServer, body: dict[str, Any], message: str) -> None:
    error = refused(server, **body)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize("words", [1100, 20_000])
def test_claude_code_knows_that_a_prompt_is_too_long(server: RunningServer, words: int) -> None:
    """It compacts the chat if the message has these words; the envelope has no code."""
    told = refused(server, messages=[{"role": "user", "content": "fox " * words}])["message"]
    assert told.startswith("prompt is too long: messages has ")
    assert "this model's maximum context length is 1024 tokens" in told


def test_the_client_raises_its_own_error_types(server: RunningServer) -> None:
    assert refused(server, 404, model="another")["type"] == "not_found_error"
    assert refused(server, 404, f"{MESSAGES}/batches")["message"] == "there is no /v1/messages/batches"
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'another'; this server has 'stories'"):
        client_of(server).messages.create(**{**ASKED, "model": "another"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
        client_of(server).messages.create(**{**ASKED, "max_tokens": 0}, stream=True)
    for method, status in (("GET", 405), ("POST", 400)):
        response = server.http.request(method, MESSAGES, content=b"{", headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["type"]) == (status, "error")


def test_an_error_in_the_middle_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    steps.llm.tokenizer.inner.chat_template = TEMPLATE  # type: ignore[union-attr]
    with RunningServer(steps.llm) as server, server.connection() as connection:
        asyncio.run(steps.llm.start())
        steps.allow(2)
        chat = [{"role": "user", "content": "a"}]
        send(connection, MESSAGES, messages=chat, max_tokens=50, temperature=0, stream=True)
        answer = read_until(connection, b"event: ping\n")
        steps.error = RuntimeError("the device is on fire")
        steps.allow()
        answer += read_until(connection, b"\r\n0\r\n\r\n")
        name, data = answer.split(b"event: ")[-1].split(b"\n")[:2]
        told = json.loads(data.removeprefix(b"data: "))
        assert (name, told["type"], told["error"]["type"]) == (b"error", "error", "api_error")
        assert "the device is on fire" in told["error"]["message"]
        whole = server.http.post(MESSAGES, json={"messages": chat, "max_tokens": 5, "stream": True})
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
        with pytest.raises(anthropic.InternalServerError, match="the device is on fire"):
            client_of(server).messages.create(model="inflight-demo", messages=chat, max_tokens=5)  # type: ignore[arg-type]
        steps.error = None
        server.check_idle()
