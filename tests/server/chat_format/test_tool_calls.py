"""Tools in chats with the `openai` client: the embedded model under grammars, and scripted texts.

The model's own template does not support tools, so each request includes a template.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from inflight import AsyncLLM
from inflight.demo_model import DEMO_MODEL
from inflight.server.serving.settings import ServerSettings
from tests.server.chat_format.scripted import (
    CALL,
    CALLS_IN_A_TEXT,
    HERMES_TEMPLATE,
    MODELS,
    ROME,
    TEMPLATES,
    TOOLS,
    UNKNOWN_TEMPLATE,
    Clock,
    ScriptedLLM,
    Weather,
    prompt_of,
    say,
    tool,
)
from tests.server.serving import HELLO, TEMPLATE, RunningServer


@pytest.fixture
def server(trusting: RunningServer) -> RunningServer:
    return trusting


def options(template: str = "hermes", **fields: Any) -> dict[str, Any]:
    asked = {"model": "stories", "messages": HELLO, "tools": TOOLS, "temperature": 1.0, "seed": 0, "max_tokens": 300}
    extra = {"chat_template": TEMPLATES[template]}
    return {**asked, **fields, "extra_body": extra}


def check(answer: ChatCompletion, num_choices: int = 1) -> list[str]:
    """Check that every choice ended with valid calls, and return the names of the called tools."""
    names = []
    assert len(answer.choices) == num_choices
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function"
            assert call.id.startswith("call_")
            MODELS[call.function.name].model_validate_json(call.function.arguments)
            names.append(call.function.name)
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    return names


def streamed(server: RunningServer, **asked: Any) -> ChatCompletion:
    """The answer that the client assembles from a stream, and its chunks."""
    with server.client.chat.completions.stream(**asked) as events:
        kinds = [event.type for event in events]
        answer = events.get_final_completion()
    assert kinds.count("chunk") > 3
    return answer


def bias(server: RunningServer, text: str) -> dict[str, int]:
    """A bias that makes the first token of `text` more likely than any other."""
    assert server.llm.tokenizer is not None
    return {str(server.llm.tokenizer.inner.encode(text, add_special_tokens=False)[0]): 100}


# ------------------------------------------------------------------------------------- calls that grammars guarantee


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_can_be_required(server: RunningServer, template: str, is_streamed: bool) -> None:
    ask = (lambda **asked: streamed(server, **asked)) if is_streamed else server.client.chat.completions.create
    for name in MODELS:
        likely = {"logit_bias": bias(server, name[0]), "parallel_tool_calls": False, "n": 2}
        asked = options(template, tool_choice="required", **likely)
        assert check(ask(**asked), num_choices=2) == [name, name]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_named_tool_is_called(server: RunningServer, template: str) -> None:
    for name in MODELS:
        choice = {"type": "function", "function": {"name": name}}
        asked = options(template, tool_choice=choice)
        assert check(server.client.chat.completions.create(**asked)) == [name]
        assert check(streamed(server, **asked)) == [name]


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called_and_the_model_is_told_of_all(server: RunningServer, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "Clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    if mode == "auto":
        say(server, CALLS_IN_A_TEXT)
    answer = server.client.chat.completions.create(**options(tool_choice=choice, parallel_tool_calls=False))
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "Clock"
    assert '"Weather"' in prompt_of(server)


def test_a_stream_and_a_whole_answer_are_equal(server: RunningServer) -> None:
    for template in ("hermes", "llama3"):
        asked = options(template, tool_choice="required", seed=7, max_tokens=120)
        whole = server.client.chat.completions.create(**asked).choices[0]
        parts = streamed(server, **asked).choices[0]
        assert whole.finish_reason == parts.finish_reason
        assert whole.message.content == parts.message.content
        calls = [[call.function for call in each.message.tool_calls or []] for each in (whole, parts)]
        assert [(call.name, call.arguments) for call in calls[0]] == [(call.name, call.arguments) for call in calls[1]]  # type: ignore[union-attr]
        assert calls[0]


def test_the_pieces_of_a_call(server: RunningServer) -> None:
    choice = {"type": "function", "function": {"name": "Weather"}}
    chunks = list(server.client.chat.completions.create(**options(tool_choice=choice, seed=3), stream=True))
    first, *others = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.delta.tool_calls) == ("assistant", None, None)
    *pieces, last = others
    assert (last.delta.tool_calls, last.finish_reason) == (None, "tool_calls")
    calls = [piece.delta.tool_calls[0] for piece in pieces if piece.delta.tool_calls]
    assert len(calls) == len(pieces)
    begun, *arguments = calls
    assert begun.function is not None
    assert (begun.index, begun.type, begun.function.name, begun.function.arguments) == (0, "function", "Weather", "")
    assert str(begun.id).startswith("call_")
    for piece in arguments:
        assert piece.function is not None
        assert (piece.index, piece.id, piece.type, piece.function.name) == (0, None, None, None)
    text = "".join(piece.function.arguments or "" for piece in arguments if piece.function)
    Weather.model_validate_json(text)


def test_log_probabilities_of_every_token_are_reported(server: RunningServer) -> None:
    choice = {"type": "function", "function": {"name": "Weather"}}
    asked = options(tool_choice=choice, seed=3, logprobs=True)
    (whole,) = server.client.chat.completions.create(**asked).choices
    parts = [chunk.choices[0] for chunk in server.client.chat.completions.create(**asked, stream=True)]
    assert whole.logprobs is not None
    told = [entry.token for entry in whole.logprobs.content or []]
    assert [entry.token for part in parts if part.logprobs for entry in part.logprobs.content or []] == told
    assert "".join(told).startswith('<tool_call>\n{"name": "Weather"')


def test_pydantic_models_can_be_tools(server: RunningServer) -> None:
    tools = [openai.pydantic_function_tool(each) for each in MODELS.values()]
    for seed in range(3):
        asked = options(tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed)
        answer = server.client.chat.completions.parse(**asked)
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])


@pytest.mark.parametrize("template", ["hermes", "llama3"])
def test_strict_tools_are_called_validly_or_not_at_all(server: RunningServer, template: str) -> None:
    strict = [tool(each, strict=True) for each in MODELS.values()]
    free = options(template, tools=strict, temperature=0, max_tokens=10)
    answer = server.client.chat.completions.create(**free).choices[0]
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "length")
    assert answer.message.content
    asked = options("llama3", tools=strict, parallel_tool_calls=False, logit_bias=bias(server, "{"))
    check(server.client.chat.completions.create(**asked))


def test_a_schema_for_content_can_be_combined_with_tools(server: RunningServer) -> None:
    tools = [openai.pydantic_function_tool(Clock)]
    for template in ("hermes", "llama3"):
        kinds = set()
        for seed in range(4):
            asked = options(template, tools=tools, seed=seed, response_format=Weather, parallel_tool_calls=False)
            message = server.client.chat.completions.parse(**asked).choices[0].message
            assert bool(message.tool_calls) != bool(message.parsed)
            kinds.add(bool(message.tool_calls))
        assert False in kinds


@pytest.mark.parametrize("max_tokens", [5, 25, 45])
def test_a_call_that_is_cut_off(server: RunningServer, max_tokens: int) -> None:
    choice = {"type": "function", "function": {"name": "Weather"}}
    asked = options(tool_choice=choice, max_tokens=max_tokens, seed=1)
    (whole,) = server.client.chat.completions.create(**asked).choices
    parts = [chunk.choices[0] for chunk in server.client.chat.completions.create(**asked, stream=True)]
    assert whole.finish_reason == parts[-1].finish_reason == "length"
    assert (whole.message.content or "") == "".join(part.delta.content or "" for part in parts)
    arguments = "".join(call.function.arguments for call in whole.message.tool_calls or [] if call.type == "function")
    pieces = [call.function for part in parts for call in part.delta.tool_calls or []]
    assert arguments == "".join(piece.arguments or "" for piece in pieces if piece)
    assert bool(arguments) == (max_tokens == 45)


# ------------------------------------------------------------------------------------- calls in free text

BARE = '{"name": "Weather", "parameters": {"city": "Rome", "unit": "C"}}'


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [("hermes", CALL, None), ("hermes", f"Let me see.\n{CALL}", "Let me see."), ("llama3", BARE, None)],
)
def test_calls_in_free_text_are_recognised(
    server: RunningServer, template: str, text: str, content: str | None
) -> None:
    asked = options(template, n=2)
    say(server, *text)
    for answer in (server.client.chat.completions.create(**asked), streamed(server, **asked)):
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == content
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "Weather"
            assert Weather.model_validate_json(call.function.arguments) == ROME


def test_text_that_is_not_a_call_is_content(server: RunningServer) -> None:
    text = f" \n{CALL.replace('Weather', 'Climate')} "
    say(server, *text)
    for answer in (server.client.chat.completions.create(**options()), streamed(server, **options())):
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert choice.message.tool_calls is None


def test_content_is_streamed_as_it_is_generated(server: RunningServer) -> None:
    say(server, "It ", "is ", "warm.")
    chunks = list(server.client.chat.completions.create(**options(), stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert texts == ["It", " is", " warm."]


def test_no_tool_is_called_if_calls_are_not_allowed(server: RunningServer) -> None:
    say(server, CALL)
    answer = server.client.chat.completions.create(**options(tool_choice="none"))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")


# ------------------------------------------------------------------------------------- the prompt of the model


def written(server: RunningServer, **fields: Any) -> str:
    """The prompt that a request becomes."""
    body = {"chat_template": HERMES_TEMPLATE, "max_tokens": 1, "return_token_ids": True, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    tokens = response.json()["prompt_token_ids"]
    return str(server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_the_template_gets_tools_and_calls(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "Weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20 C", "tool_call_id": "call_1"},
    ]
    text = written(
        server, messages=chat, tools=[tool(Clock, strict=True), {"type": "function", "function": {"name": "f"}}]
    )
    first, second, rest = text.removeprefix("<s>").split("\n", 2)
    assert json.loads(first) == tool(Clock)
    assert json.loads(second)["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert "assistant : Weather(Rome)" in rest
    assert "tool Weather: 20 C" in rest
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert written(server, messages=chat[:1], **fields) == "<s><|user|>user : Is it warm?<|end|><|assistant|>"


def test_a_call_that_is_no_json_comes_back_as_it_was_written(server: RunningServer) -> None:
    """Agents send a call that was cut off back, with what went wrong as its result (LlamaIndex, Codex)."""
    function = {"name": "Weather", "arguments": '{"city": "Ro'}
    chat = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "not JSON", "tool_call_id": "c"},
    ]
    template = "{{ messages[1].tool_calls[0].function.arguments }};{{ messages[2].content }}"
    assert written(server, chat_template=template, messages=chat).endswith('{"city": "Ro;not JSON')


def test_a_conversation_continues_with_the_messages_of_the_client(server: RunningServer) -> None:
    tools = [openai.pydantic_function_tool(each) for each in MODELS.values()]
    asked = options(tools=tools, tool_choice="required", parallel_tool_calls=False)
    called = server.client.chat.completions.parse(**asked).choices[0].message
    (call,) = called.tool_calls or []
    told = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "20 C"}]}
    asked = options(messages=[*HELLO, called, told], tools=tools, tool_choice="none", response_format=Weather)
    answered = server.client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(answered.parsed, Weather)
    asked["messages"] += [answered, *HELLO]
    assert isinstance(server.client.chat.completions.parse(**asked).choices[0].message.parsed, Weather)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": TOOLS}, "tools", "this model's notation of calls is unknown"),
        ({"tools": TOOLS, "chat_template": TEMPLATE}, "tools", "chat template does not tell the model about tools"),
        ({"tools": [TOOLS[0]] * 2, "tool_choice": "required"}, "tools", "tools has 'Weather' more than once"),
        ({"tool_choice": "required"}, "tool_choice", "tools has no tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom", "there is no field 'custom'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "it should be 'none', 'auto' or 'required'"),
        ({"tools": [tool(Weather, True)], "guided_regex": "a", "chat_template": HERMES_TEMPLATE}, "tools", "regex is"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}],
                "chat_template": HERMES_TEMPLATE,
            },
            "tools",
            "the tool 'f': json_schema has 'not'",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("strictly")
def test_invalid_tool_requests_are_refused(
    server: RunningServer, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    body = {"messages": HELLO, "chat_template": UNKNOWN_TEMPLATE, "stream": stream, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_schemas_of_any_depth_are_answered(server: RunningServer) -> None:
    for depth in (10, 60, 130, 960, 100_000):
        schema = '{"properties": {"a": ' + '{"items":' * depth + "{}" + "}" * depth + "}}"
        tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'
        for template in ("{{ messages[0].content }}", "{{ tools | tojson }}"):
            body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": {tools}, "tool_choice": "required"'
            body += f', "max_tokens": 2, "chat_template": "{template}"}}'
            headers = {"content-type": "application/json"}
            response = server.http.post("/v1/chat/completions", content=body, headers=headers)
            assert response.status_code == (200 if depth < 128 else 400), response.text


def test_the_operator_chooses_the_call_format(server: RunningServer) -> None:
    llm = ScriptedLLM(num_blocks=500, in_process=True)
    with RunningServer(llm, trust_request_chat_template=True, tool_call_parser="llama3") as other:
        say(other, BARE)
        answer = other.client.chat.completions.create(**{**options("unknown"), "model": "inflight-demo"})
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "Weather"


def test_a_marker_may_be_a_special_token(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((DEMO_MODEL / name).read_text().replace("<pad>", "<tool_call>"))
    with RunningServer(AsyncLLM(folder, num_blocks=500, in_process=True), trust_request_chat_template=True) as server:
        assert server.llm.tokenizer is not None
        marker = server.llm.tokenizer.inner.convert_tokens_to_ids("<tool_call>")
        assert not server.llm.tokenizer.has_text(marker)
        choice = {"type": "function", "function": {"name": "Weather"}}
        asked = {**options(tool_choice=choice), "model": "inflight-demo"}
        asked["extra_body"] = {**asked["extra_body"], "return_token_ids": True}
        answer = server.client.chat.completions.create(**asked)
        assert check(answer) == ["Weather"]
        assert answer.choices[0].model_extra is not None
        assert answer.choices[0].model_extra["token_ids"].count(marker) == 1
        assert check(streamed(server, **asked)) == ["Weather"]


def test_an_unknown_call_format_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_call_parser is 'xml'; it must be one of 'hermes', 'llama3', 'mistral'"):
        ServerSettings(tool_call_parser="xml")


def test_the_embedded_model_takes_what_agents_send(shared_server: RunningServer) -> None:
    """An agent's loop, with the template that the embedded model comes with: a forced call, its result, an answer."""
    client, tools = shared_server.client, [openai.pydantic_function_tool(each) for each in MODELS.values()]
    chat: list[Any] = [{"role": "developer", "content": "You are a helpful assistant."}, *HELLO]
    asked = client.chat.completions.create(model="stories", messages=chat, tools=tools, tool_choice="required")
    (call, *_) = asked.choices[0].message.tool_calls or []
    assert call.type == "function"
    MODELS[call.function.name].model_validate_json(call.function.arguments)
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "fine"}
        for each in asked.choices[0].message.tool_calls or []
    ]
    told = client.chat.completions.create(
        model="stories", messages=[*chat, asked.choices[0].message, *results], tools=tools, max_tokens=20
    )
    assert told.choices[0].message.content
