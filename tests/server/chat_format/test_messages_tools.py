"""Tools in Anthropic's messages with the `anthropic` client."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, ToolUseBlock

from inflight.server.anthropic.request import CountRequest
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from tests.server.chat_format.scripted import (
    CALL,
    CALLS_IN_A_TEXT,
    MODELS,
    ROME,
    UTC,
    Weather,
    cut_by_chance,
    prompt_of,
    say,
    tool,
)
from tests.server.serving import HELLO, RunningServer

MESSAGES = "/v1/messages"


def anthropic_tool(name: str, **more: Any) -> dict[str, Any]:
    function = tool(MODELS[name])["function"]
    return {"name": name, "description": function["description"], "input_schema": function["parameters"], **more}


TOOLS = [anthropic_tool(name) for name in MODELS]


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def both(server: RunningServer, **fields: Any) -> tuple[Message, Message]:
    """The whole answer, and the answer that the client assembles from a stream."""
    asked: dict[str, Any] = {"model": "stories", "messages": HELLO, "tools": TOOLS, "max_tokens": 300, **fields}
    asked = {**asked, "extra_body": {"temperature": 1.0}}
    with client_of(server).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    return client_of(server).messages.create(**asked), streamed


def test_a_call_can_be_required(hermes: RunningServer) -> None:
    for answer in both(hermes, tool_choice={"type": "any", "disable_parallel_tool_use": True}):
        (block,) = answer.content
        assert isinstance(block, ToolUseBlock)
        assert answer.stop_reason == "tool_use"
        MODELS[block.name].model_validate(block.input)


@pytest.mark.parametrize("name", MODELS)
def test_the_named_tool_is_called(hermes: RunningServer, name: str) -> None:
    for answer in both(hermes, tool_choice={"type": "tool", "name": name}):
        (block,) = answer.content
        assert isinstance(block, ToolUseBlock)
        assert block.name == name
        MODELS[name].model_validate(block.input)


@pytest.mark.parametrize("seed", range(3))
def test_texts_and_calls_are_blocks_in_order(hermes: RunningServer, seed: int) -> None:
    say(hermes, *cut_by_chance(CALLS_IN_A_TEXT, seed))
    for answer in both(hermes):
        blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in answer.content]
        assert [{key: block[key] for key in block if key in ("type", "text", "name", "input")} for block in blocks] == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "Weather", "input": ROME.model_dump()},
            {"type": "tool_use", "name": "Clock", "input": UTC.model_dump()},
            {"type": "text", "text": " That is all."},
        ]
        assert answer.stop_reason == "tool_use"
        assert len({block.id for block in answer.content if isinstance(block, ToolUseBlock)}) == 2


def test_the_events_of_a_stream_are_complete_and_in_order(hermes: RunningServer) -> None:
    say(hermes, "It ", "is. ", CALL)
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, "stream": True}
    events = hermes.http.post(MESSAGES, json=body).text.removesuffix("\n\n").split("\n\n")
    told = [json.loads(event.split("\ndata: ")[1]) for event in events]
    assert [(event["type"], event.get("index")) for event in told] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_no_tool_is_called_if_calls_are_not_allowed(hermes: RunningServer) -> None:
    say(hermes, CALL)
    for answer in both(hermes, tool_choice={"type": "none"}):
        assert [block.type for block in answer.content] == ["text"]
        assert answer.stop_reason == "end_turn"
    assert "Weather" not in prompt_of(hermes)


@pytest.mark.parametrize("max_tokens", [5, 45])
def test_a_call_that_is_cut_off(hermes: RunningServer, max_tokens: int) -> None:
    for answer in both(hermes, tool_choice={"type": "tool", "name": "Weather"}, max_tokens=max_tokens):
        assert answer.stop_reason == "max_tokens"
        (block,) = answer.content
        assert block.type == ("text" if max_tokens == 5 else "tool_use")


def test_a_conversation_continues_with_tool_results(hermes: RunningServer) -> None:
    (called, _) = both(hermes, tool_choice={"type": "tool", "name": "Weather"})
    (call,) = called.content
    assert isinstance(call, ToolUseBlock)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 C"}]}
    chat = [
        *HELLO,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    say(hermes, "Yes.")
    for answer in both(hermes, messages=chat):
        assert answer.content[0].text == "Yes."  # type: ignore[union-attr]
    city = Weather.model_validate(call.input).city
    end = f"assistant : Weather({city})<|end|><|user|>tool Weather: 20 C<|end|><|user|>user : Well?<|end|><|assistant|>"
    assert prompt_of(hermes).endswith(end)
    count = client_of(hermes).messages.count_tokens
    without, with_tools = (count(model="stories", messages=chat, tools=each).input_tokens for each in ([], TOOLS))  # type: ignore[arg-type]
    assert with_tools > without


def test_blocks_are_converted_to_messages() -> None:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": f"f{i}", "input": {"x": i}} for i in range(2)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "is_error": True} for i in (1, 0)]
    body = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, *calls]},
            {"role": "user", "content": results},
        ]
    }
    functions = [{"name": f"f{i}", "arguments": {"x": i}} for i in range(2)]
    assert CountRequest.model_validate(body).for_template(ServerSettings()) == {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [{"id": f"c{i}", "type": "function", "function": functions[i]} for i in range(2)],
            },
            {"role": "tool", "content": "", "tool_call_id": "c1", "name": "f1"},
            {"role": "tool", "content": "", "tool_call_id": "c0", "name": "f0"},
        ],
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    with pytest.raises(ApiError, match="messages end with calls"):
        CountRequest.model_validate({"messages": body["messages"][:2]}).for_template(ServerSettings())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOLS[0]] * 2, "tool_choice": {"type": "any"}}, "tools has 'Weather' more than once"),
        ({"tool_choice": {"type": "any"}}, "a tool must be called, but tools has no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "'f' must be called, but tools has only"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice must have a name if it is of type 'tool'"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice must have a name if it is of"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: the type is 'bash_20250124'; this server"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0]: defer_loading is True; this server does not"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0] is of the role 'user', which has no blocks of type 'tool_use'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0] is of the role 'assistant', which has no blocks of type 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages[0] is of the role 'user', which has no blocks of type 'thinking'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id is missing",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any"}, "stop_sequences": ["a"]},
            "stop is ['a']; it cannot be combined with structured output",
        ),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_bad_bodies_are_refused(hermes: RunningServer, fields: dict[str, Any], message: str) -> None:
    response = hermes.http.post(MESSAGES, json={"messages": HELLO, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
