"""`/v1/responses` with the `openai` client: answers, streams, continued conversations, refusals."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem
from openai.types.responses import Response

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.settings import IN_MEMORY
from tests import zoo
from tests.server.chat_format.scripted import prompt_of, say, scripted_server
from tests.server.serving import TEMPLATE, RunningServer, read_until, send
from tests.stepper import Stepper
from tests.text.tokenizers_for_tests import byte_level

RESPONSES = "/v1/responses"
NUM_TOKENS = 20
ASK = "Tell me a story about a fox."
GREEDY: dict[str, Any] = {"model": "stories", "temperature": 0, "max_output_tokens": NUM_TOKENS}
MODEL: dict[str, Any] = {"model": "inflight-demo"}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


def answer_to(offline: LLM, *texts: str) -> str:
    """The model's answer in a chat in which user and assistant take turns."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    (output,) = offline.chat([chat], params, use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(scope="module")
def expected(offline: LLM) -> str:
    return answer_to(offline, ASK)


def test_a_text_input_is_answered(server: RunningServer, expected: str) -> None:
    answer = server.client.responses.create(input=ASK, metadata={"by": "me"}, **GREEDY)
    assert answer.output_text == expected
    (item,) = answer.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert (answer.object, answer.model, answer.status) == ("response", "stories", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.error, answer.metadata, answer.temperature, answer.max_output_tokens) == (
        None,
        {"by": "me"},
        0,
        NUM_TOKENS,
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == answer.usage.input_tokens + NUM_TOKENS
    again = server.client.responses.create(input=ASK + " And a bear." * 20, **GREEDY)
    again = server.client.responses.create(input=ASK + " And a bear." * 20, **GREEDY)
    assert again.usage is not None
    assert 0 < again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


def test_an_answer_without_a_limit_ends_at_eos(server: RunningServer, expected: str) -> None:
    answer = server.client.responses.create(model="stories", input=ASK, temperature=0)
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.output_text.startswith(expected)
    assert len(answer.output_text) > len(expected)


def test_the_events_of_a_stream_are_complete_and_in_order(server: RunningServer, expected: str) -> None:
    stream = list(server.client.responses.create(input=ASK, stream=True, **GREEDY))
    names = [event.type.removeprefix("response.") for event in stream]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == expected
    first, last = stream[0], stream[-1]
    assert first.type == "response.created"
    assert last.type == "response.incomplete"
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
    assert last.response.output_text == expected
    begun, ended = (e.item for e in stream if e.type in ("response.output_item.added", "response.output_item.done"))
    assert begun.id == ended.id == last.response.output[0].id
    assert {event.item_id for event in stream if hasattr(event, "item_id")} == {begun.id}
    assert server.client.responses.retrieve(first.response.id) == last.response
    raw = server.http.post(RESPONSES, json={"input": ASK, "stream": True, **GREEDY}).text
    assert all(
        name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
        for name, data in (event.split("\n") for event in raw.removesuffix("\n\n").split("\n\n"))
    )


def test_streams_as_assembled_by_clients(server: RunningServer, expected: str) -> None:
    with server.client.responses.stream(model="stories", input=ASK, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert "".join(texts) == answer.output_text
    assert answer.status == "completed"

    async def check() -> None:
        async with server.async_client as client:
            whole = await client.responses.create(input=ASK, **GREEDY)
            async with client.responses.stream(model="stories", input=ASK, temperature=0) as stream:
                texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
        assert whole.output_text == expected
        assert texts[-1] == final.output_text == answer.output_text

    asyncio.run(check())


def test_a_conversation_is_continued(server: RunningServer, offline: LLM, expected: str) -> None:
    client = server.client
    first = client.responses.create(input=ASK, **GREEDY)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **GREEDY)
    reply = answer_to(offline, ASK, expected, "And then?")
    assert (second.output_text, second.previous_response_id) == (reply, first.id)
    by_hand = client.responses.create(
        input=[{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And then?"}],  # type: ignore[list-item]
        **GREEDY,
    )
    assert by_hand.output_text == reply
    client.responses.delete(first.id)
    third = client.responses.create(input="Why?", previous_response_id=second.id, **GREEDY)
    assert third.output_text == answer_to(offline, ASK, expected, "And then?", reply, "Why?")


def test_which_responses_are_stored(server: RunningServer) -> None:
    client = server.client
    kept = client.responses.create(input=ASK, **GREEDY)
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    for gone in (kept.id, client.responses.create(input=ASK, store=False, **GREEDY).id, "resp_never"):
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=f"there is no response '{gone}': it was never stored"):
                ask(gone)
        with pytest.raises(openai.BadRequestError, match="was deleted, or had to make room") as told:
            client.responses.create(input="And then?", previous_response_id=gone, **GREEDY)
        assert (told.value.param, told.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.BadRequestError, match="there is no parameter 'stream'"):
        list(client.responses.retrieve(kept.id, stream=True))


def response_of(size: int) -> StoredResponse:
    return StoredResponse(b"x" * size, ())


@pytest.mark.parametrize("is_file", [False, True])
def test_the_least_recently_used_responses_are_evicted(tmp_path: Path, is_file: bool) -> None:
    path = str(tmp_path / "store") if is_file else IN_MEMORY
    store = ResponseStore(path, max_bytes=100_000)
    for name in ("a", "b"):
        store.put(name, response_of(40_000))
    assert store.get("a")
    store.put("c", response_of(40_000))
    assert [name for name in "abc" if store.get(name)] == ["a", "c"]
    store.put("d", response_of(98_000))
    assert [name for name in "abcd" if store.get(name)] == ["d"]
    store.put("e", response_of(200_000))
    assert [name for name in "abcde" if store.get(name)] == ["d"]
    assert (store.delete("d"), store.delete("d")) == (True, False)
    store.put("f", StoredResponse(b"x", ({"role": "user", "content": "\ud800", "n": 2**70},)))
    store.close()
    if is_file:  # the next server finds it, and what it has counts
        store = ResponseStore(path, max_bytes=100_000)
        found = store.get("f")
        assert found is not None
        assert (found.answer, found.chat) == (b"x", ({"role": "user", "content": "\ud800", "n": 2**70},))
        store.put("g", response_of(98_000))
        assert [name for name in "fg" if store.get(name)] == ["g"]
        store.close()
        store = ResponseStore(path)
        store._db.execute("DROP TABLE entries")
        store.put("h", response_of(10))  # is logged, and the answer goes out
        store.close()
        (tmp_path / "store").write_bytes(b"something else" * 1000)
        with pytest.raises(ValueError, match="cannot be used: file is not a database"):
            ResponseStore(path)


def test_a_server_stores_responses_within_its_limits(server: RunningServer) -> None:
    before, server.app.state.responses = server.app.state.responses, ResponseStore(max_bytes=4500)
    try:
        first, second = (server.client.responses.create(input=ASK, **GREEDY) for _ in range(2))
        assert server.client.responses.retrieve(second.id) == second
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(first.id)
    finally:
        server.app.state.responses = before


# ---------------------------------------------------------------------------- conversations, background, compact


def strictly_read(kind: Any, answer: Any) -> None:
    """Check an answer of the client against all that its types say."""
    pydantic.TypeAdapter(kind).validate_python(answer.model_dump(mode="json", by_alias=True), strict=False)


def test_a_conversation_is_stored_continued_and_listed(server: RunningServer, offline: LLM, expected: str) -> None:
    client = server.client
    begun = client.conversations.create(items=[{"role": "user", "content": ASK}], metadata={"by": "me"})
    strictly_read(Conversation, begun)
    said: Any = {"type": "message", "role": "assistant", "content": expected}
    client.conversations.items.create(begun.id, items=[said])
    answer = client.responses.create(input="And then?", conversation=begun.id, **GREEDY)
    strictly_read(Response, answer)
    reply = answer_to(offline, ASK, expected, "And then?")
    assert (answer.output_text, answer.conversation.id) == (reply, begun.id)  # type: ignore[union-attr]
    with client.responses.stream(input="Why?", conversation={"id": begun.id}, **GREEDY) as stream:  # type: ignore[call-overload]
        last = stream.get_final_response()
    assert last.output_text == answer_to(offline, ASK, expected, "And then?", reply, "Why?")
    pages = client.conversations.items.list(begun.id, order="asc", limit=4)
    items: list[Any] = list(pages)  # of both pages
    for item in items:
        strictly_read(ConversationItem, item)
    assert [item.role for item in items] == ["user", "assistant"] * 3
    assert [item.content[0].text for item in items] == [ASK, expected, "And then?", reply, "Why?", last.output_text]
    assert (items[3].id, items[5].id) == (answer.output[0].id, last.output[0].id)
    assert [item.id for item in client.conversations.items.list(begun.id, limit=2)] == [each.id for each in items[::-1]]
    assert client.conversations.retrieve(begun.id) == begun
    strictly_read(ConversationDeletedResource, client.conversations.delete(begun.id))
    for ask in (client.conversations.retrieve, client.conversations.delete, client.responses.retrieve):
        with pytest.raises(openai.NotFoundError, match=begun.id):
            ask(begun.id)
    other = client.conversations.create()
    with pytest.raises(openai.BadRequestError, match=f"there is no response '{other.id}'"):
        client.responses.create(input="So?", previous_response_id=other.id, **GREEDY)
    assert client.responses.create(input=ASK, conversation=other.id, **GREEDY).output_text == expected
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        client.responses.create(input="So?", conversation=begun.id, **GREEDY)


def test_a_response_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    steps.llm.tokenizer.inner.chat_template = TEMPLATE  # type: ignore[union-attr]
    with RunningServer(steps.llm) as server, server.connection() as connection:
        asyncio.run(steps.llm.start())
        send(connection, RESPONSES, input="a", max_output_tokens=5, temperature=0, background=True)
        begun = json.loads(read_until(connection, b'"user":null}').partition(b"\r\n\r\n")[2])
        connection.close()  # the client leaves
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        client = server.client
        steps.allow(1)
        while (answer := client.responses.retrieve(begun["id"])).status == "queued":
            pass
        assert answer.status == "in_progress"
        steps.allow(4)
        while (answer := client.responses.retrieve(begun["id"])).status == "in_progress":
            pass
        strictly_read(Response, answer)
        assert answer.status == "incomplete"
        assert answer.usage is not None
        assert answer.usage.output_tokens == 5
        assert client.responses.cancel(answer.id) == answer
        more = client.responses.create(
            input="b", previous_response_id=answer.id, background=True, model="inflight-demo"
        )
        with pytest.raises(openai.BadRequestError, match="is not finished"):
            client.responses.create(input="c", previous_response_id=more.id, **MODEL)
        cancelled = client.responses.cancel(more.id)
        assert (cancelled.status, client.responses.retrieve(more.id).status) == ("cancelled", "cancelled")
        strictly_read(Response, cancelled)
        steps.error = RuntimeError("the device is on fire")
        failing = client.responses.create(input="d", background=True, **MODEL)
        steps.allow()
        while (failed := client.responses.retrieve(failing.id)).status != "failed":
            pass
        assert failed.error is not None
        assert "the device is on fire" in failed.error.message
        steps.error = None
        server.check_idle()
        assert not server.app.state.responses.running


def test_only_responses_in_the_background_are_cancelled(server: RunningServer) -> None:
    answer = server.client.responses.create(input=ASK, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="does not run in the background"):
        server.client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        server.client.responses.cancel("resp_never")


def test_a_compacted_conversation_is_the_next_input() -> None:
    with scripted_server(TEMPLATE) as server:
        say(server, "It was a fox.")
        given: list[Any] = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        ]
        compacted = server.client.responses.compact(model="stories", input=given, instructions="0")
        assert prompt_of(server).startswith("[s]0;[u]1;[a]2;[u]3;[u]Summarize")
        assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", 1)
        *users, summary = [each.to_dict() for each in compacted.output]
        assert [(each["role"], each["content"][0]["text"]) for each in users] == [("user", "1"), ("user", "3")]
        assert (summary["type"], "fox" in str(summary)) == ("compaction", False)
        server.client.responses.create(model="stories", input=[*users, summary, {"role": "user", "content": "4"}])
        assert prompt_of(server) == "[u]1;[u]3;[u][summary of the conversation so far]\nIt was a fox.;[u]4;[a]"
        again = server.client.responses.compact(model="stories", input=[*users, summary, *given[:1]])
        assert [each.type for each in again.output] == ["message"] * 3 + ["compaction"]
        first = server.client.responses.create(model="stories", input="5")
        server.client.responses.compact(model="stories", previous_response_id=first.id)
        assert prompt_of(server).startswith("[u]5;[a]It was a fox.;[u]Summarize")
        foreign = {"type": "compaction", "encrypted_content": "gAAA"}
        answer = server.http.post(RESPONSES, json={"input": [foreign]})
        assert (answer.status_code, "only its provider" in prompt_of(server)) == (200, True)


def test_log_probabilities_are_reported_in_the_responses_format(server: RunningServer, expected: str) -> None:
    whole = server.client.responses.create(input=ASK, **GREEDY, **LOGPROBS)
    (part,) = whole.output[0].content  # type: ignore[union-attr, misc]
    assert "".join(entry.token for entry in part.logprobs) == expected  # type: ignore[union-attr]
    assert all(entry.top_logprobs[0].token == entry.token for entry in part.logprobs)  # type: ignore[union-attr]
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {3}  # type: ignore[union-attr]
    stream = server.client.responses.create(input=ASK, stream=True, **GREEDY, **LOGPROBS)
    told = [entry for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in part.logprobs]  # type: ignore[union-attr]
    plain = server.http.post(RESPONSES, json={"input": ASK, **GREEDY}).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []


def test_the_answer_is_json_of_the_schema(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"fox": {"enum": ["red", "blue"]}}, "required": ["fox"]}
    text: Any = {"format": {"type": "json_schema", "name": "fox", "schema": {**schema, "additionalProperties": False}}}
    answer = server.client.responses.create(model="stories", input=ASK, text=text, temperature=0)
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["fox"] in ("red", "blue")
    assert answer.text is not None
    assert answer.text.to_dict()["format"] == text["format"]
    cut = server.client.responses.create(input=ASK, text={"format": {"type": "json_object"}}, **GREEDY)
    assert cut.output_text.lstrip().startswith("{")


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[RunningServer]:
    """A server whose model has no EOS and a short context, and whose template accepts every role."""
    tokenizer = byte_level().inner
    tokenizer.chat_template = TEMPLATE
    with RunningServer(AsyncLLM(zoo.build("gpt2"), tokenizer, in_process=True)) as server:
        yield server


def num_tokens_of(server: RunningServer, text: str) -> int:
    tokens = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    return int(tokens["count"])


def num_input_tokens(server: RunningServer, **body: Any) -> int:
    response = server.http.post(RESPONSES, json={"max_output_tokens": 1, **body})
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["input_tokens"])


def test_the_prompt_of_a_conversation(tiny_server: RunningServer) -> None:
    def count(text: str) -> int:
        return num_tokens_of(tiny_server, text)

    def asked(*chat: dict[str, Any], **others: Any) -> int:
        return num_input_tokens(tiny_server, input=list(chat), **others)

    parts = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]
    ask: dict[str, Any] = {"role": "user", "content": parts}
    reply: dict[str, Any] = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "3", "annotations": [], "logprobs": []}],
    }
    assert num_input_tokens(tiny_server, input="1") == count("[u]1;[a]")
    assert asked(ask) == count("[u]1\n2;[a]")
    assert asked(ask, reply, ask) == count("[u]1\n2;[a]3;[u]1\n2;[a]")
    assert asked(ask, instructions="0") == count("[s]0;[u]1\n2;[a]")
    assert asked({"role": "developer", "content": "0"}, ask) == count("[s]0;[u]1\n2;[a]")
    harmless = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": None, "user": "me"}
    changed = {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "background": False, "service_tier": "auto"}
    assert asked(ask, include=["reasoning.encrypted_content"], **harmless, **changed) == asked(ask)


def test_instructions_do_not_carry_over_to_the_next_response(tiny_server: RunningServer) -> None:
    body = {"input": "1", "instructions": "0", "max_output_tokens": 1}
    first = tiny_server.http.post(RESPONSES, json=body).json()
    text = first["output"][0]["content"][0]["text"]
    num_tokens = num_input_tokens(tiny_server, input="2", previous_response_id=first["id"])
    assert num_tokens == num_tokens_of(tiny_server, f"[u]1;[a]{text};[u]2;[a]")


def test_input_that_does_not_fit_is_refused_or_truncated(tiny_server: RunningServer) -> None:
    context = tiny_server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    turn = [{"role": "user", "content": "1" * 10}, {"role": "assistant", "content": "2" * 10}]
    chat = [{"role": "system", "content": "0"}, *turn * 40, {"role": "user", "content": "3"}]
    num_each = num_tokens_of(tiny_server, f"[u]{'1' * 10};[a]{'2' * 10};")
    response = tiny_server.http.post(RESPONSES, json={"input": chat})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    kept = num_input_tokens(tiny_server, input=chat, truncation="auto", instructions="4")
    rest = num_tokens_of(tiny_server, "[s]4;[s]0;[u]3;[a]")
    assert (kept - rest) % num_each == 0  # whole turns
    assert context * 3 // 4 - num_each < kept <= context * 3 // 4
    alone = [*turn, {"role": "user", "content": "3" * (context * 7 // 8)}]
    assert num_input_tokens(tiny_server, input=alone, truncation="auto") < context
    hopeless = {"input": [*turn, {"role": "user", "content": "3" * context}], "truncation": "auto"}
    assert tiny_server.http.post(RESPONSES, json=hopeless).status_code == 400


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": None}, "input is None; it should be", "input"),
        ({"input": []}, "list should have at least 1 item", "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "the type is 'input_image'; this server takes parts", None),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output is missing", None),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "this server takes items of type 'message' or 'reasoning'",
            None,
        ),
        ({"input": "fox " * 2000}, "this model's maximum context length is 1024 tokens", "input"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort is 3", "reasoning.effort"),
        ({"background": True, "stream": True}, "background is true; such a response is stored", "background"),
        ({"background": True, "store": False}, "background is true; such a response is stored", "background"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "are both given", "conversation"),
        ({"prompt": {"id": "1"}}, "this server does not support it", "prompt"),
        ({"max_tokens": 5}, "there is no field 'max_tokens'; did you mean 'max_output_tokens'?", "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0; it must be an integer from 1", "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "it must be", "max_output_tokens"),
        ({"temperature": -1}, "temperature is -1.0; it must be", "temperature"),
        ({"top_p": 0}, "top_p is 0.0; it must be", "top_p"),
        ({"top_logprobs": 2}, "but include has no 'message.output_text.logprobs'", "top_logprobs"),
        ({**LOGPROBS, "top_logprobs": 6}, "top_logprobs is 6; this server takes at most 5", "top_logprobs"),
        ({"include": ["everything"]}, "include[0] is 'everything'", "include[0]"),
        ({"stream_options": {}}, "stream_options is given, but stream is not true", "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "this server does not support it", None),
        ({"text": {"verbosity": "low"}}, "this server does not support it", "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format must have a schema", "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "fox"}}}},
            "fox",
            None,
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type is 'grammar'", "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata.a is 1", "metadata.a"),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_bad_bodies_are_refused(server: RunningServer, body: dict[str, Any], message: str, param: str | None) -> None:
    response = server.http.post(RESPONSES, json={"input": ASK, "max_output_tokens": 2, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


def test_an_error_in_the_middle_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    steps.llm.tokenizer.inner.chat_template = TEMPLATE  # type: ignore[union-attr]
    with RunningServer(steps.llm) as server, server.connection() as connection:
        asyncio.run(steps.llm.start())
        steps.allow(2)
        send(connection, RESPONSES, input="a", max_output_tokens=50, temperature=0, stream=True)
        answer = read_until(connection, b"event: response.content_part.added")
        steps.error = RuntimeError("the device is on fire")
        steps.allow()
        answer += read_until(connection, b"\r\n0\r\n\r\n")
        name, data = answer.split(b"event: ")[-1].split(b"\n")[:2]
        told = json.loads(data.removeprefix(b"data: "))
        assert (name, told["type"], told["response"]["status"]) == (b"response.failed", "response.failed", "failed")
        assert told["response"]["error"]["code"] == "server_error"
        assert "the device is on fire" in told["response"]["error"]["message"]
        for is_stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the device is on fire"):
                server.client.responses.create(model="inflight-demo", input="a", stream=is_stream)
        steps.error = None
        server.check_idle()


def test_what_cannot_be_stored_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(str(path), max_bytes=5000)
    store.put("conv_a", StoredResponse(b"{}", ({"id": "1"},)))
    store.extend("conv_a", [{"id": "x" * 5000}])
    known = store.get("conv_a")
    assert known is not None
    assert known.chat == ({"id": "1"},)
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="cannot be used: database is locked"):
        ResponseStore(str(path))
    store.close()
    again = ResponseStore(str(path))
    assert again.get("conv_a") == known
    again.close()
    again.extend("conv_a", [{"id": "2"}])  # what the file cannot take costs no answer


def test_a_compaction_without_a_summary_is_an_error() -> None:
    with scripted_server(TEMPLATE) as server:
        say(server, " ")
        answer = server.http.post("/v1/responses/compact", json={"input": "1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "compaction_failed")
