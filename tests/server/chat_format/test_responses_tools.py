"""Tools in `/v1/responses` with the `openai` client."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage

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
from tests.server.serving import RunningServer

RESPONSES = "/v1/responses"
ASK = "Is it warm?"
TOOLS = [{"type": "function", "strict": None, **tool(model)["function"]} for model in MODELS.values()]


def both(server: RunningServer, **fields: Any) -> tuple[Response, Response]:
    """The whole answer, and the answer that the client assembles from a stream."""
    asked: dict[str, Any] = {"model": "stories", "input": ASK, "tools": TOOLS, "max_output_tokens": 300, **fields}
    with server.client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return server.client.responses.create(**asked), streamed


def call_of(answer: Response) -> ResponseFunctionToolCall:
    (call,) = answer.output
    assert isinstance(call, ResponseFunctionToolCall)
    return call


def test_a_call_can_be_required(hermes: RunningServer) -> None:
    for answer in both(hermes, tool_choice="required", parallel_tool_calls=False):
        call = call_of(answer)
        MODELS[call.name].model_validate_json(call.arguments)
        assert (answer.status, call.status, answer.output_text) == ("completed", "completed", "")
        assert (answer.tool_choice, answer.parallel_tool_calls, len(answer.tools)) == ("required", False, 2)


@pytest.mark.parametrize("name", MODELS)
def test_the_named_tool_is_called(hermes: RunningServer, name: str) -> None:
    for answer in both(hermes, tool_choice={"type": "function", "name": name}):
        call = call_of(answer)
        assert call.name == name
        MODELS[name].model_validate_json(call.arguments)


def test_only_allowed_tools_are_called(hermes: RunningServer) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "Clock"}]}
    for answer in both(hermes, tool_choice=choice, parallel_tool_calls=False):
        assert call_of(answer).name == "Clock"
        assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(3))
def test_texts_and_calls_are_items_in_order(hermes: RunningServer, seed: int) -> None:
    say(hermes, *cut_by_chance(CALLS_IN_A_TEXT, seed))
    for answer in both(hermes):
        before, *calls, after = answer.output
        assert isinstance(before, ResponseOutputMessage)
        assert isinstance(after, ResponseOutputMessage)
        assert answer.output_text == "Let me see. That is all."
        told = [(call.name, json.loads(call.arguments)) for call in calls]  # type: ignore[union-attr]
        assert told == [("Weather", ROME.model_dump()), ("Clock", UTC.model_dump())]
        assert len({item.id for item in answer.output}) == 4
        assert len({call.call_id for call in calls}) == 2  # type: ignore[union-attr]


def test_the_events_of_a_stream_are_complete_and_in_order(hermes: RunningServer) -> None:
    say(hermes, "It ", "is. ", CALL)
    body = {"input": ASK, "tools": TOOLS, "stream": True}
    events = hermes.http.post(RESPONSES, json=body).text.removesuffix("\n\n").split("\n\n")
    told = [json.loads(event.split("\ndata: ")[1]) for event in events]
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in told] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("output_text.delta", 0),
        ("output_text.delta", 0),
        ("output_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("completed", None),
    ]
    begun, ended = told[9]["item"], told[12]["item"]
    assert (begun["arguments"], begun["status"], ended["status"]) == ("", "in_progress", "completed")
    assert {**begun, "arguments": ended["arguments"], "status": "completed"} == ended
    assert [item["id"] for item in told[-1]["response"]["output"]] == [told[2]["item"]["id"], ended["id"]]


def test_a_call_that_is_cut_off(hermes: RunningServer) -> None:
    asked: Any = {"model": "stories", "input": ASK, "tools": TOOLS, "max_output_tokens": 45}
    asked["tool_choice"] = {"type": "function", "name": "Weather"}
    *_, last = hermes.client.responses.create(**asked, stream=True)
    for answer in (last.response, hermes.client.responses.create(**asked)):
        assert (answer.status, call_of(answer).status) == ("incomplete", "incomplete")
    rest = [*output_of(call_of(answer)), ASK_AGAIN]
    say(hermes, "Yes.")
    prompts = set()
    for going_on in (
        {"previous_response_id": answer.id, "input": rest},
        {"input": [{"role": "user", "content": ASK}, *answer.output, *rest]},
    ):
        assert both(hermes, **going_on)[0].output_text == "Yes."
        prompts.add(prompt_of(hermes))
    assert len(prompts) == 1


ASK_AGAIN = {"role": "user", "content": "Well?"}


def output_of(call: ResponseFunctionToolCall) -> list[dict[str, Any]]:
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "20 C"}]


def test_a_conversation_continues_with_tool_outputs(hermes: RunningServer) -> None:
    """The conversation continues from the stored response, and from what the client sends back."""
    (called, _) = both(hermes, tool_choice={"type": "function", "name": "Weather"})
    call = call_of(called)
    city = Weather.model_validate_json(call.arguments).city
    end = f"assistant : Weather({city})<|end|><|user|>tool Weather: 20 C<|end|><|user|>user : Well?<|end|><|assistant|>"
    say(hermes, "Yes.")
    for going_on in (
        {"previous_response_id": called.id, "input": [*output_of(call), ASK_AGAIN]},
        {"input": [{"role": "user", "content": ASK}, *called.output, *output_of(call), ASK_AGAIN]},
        {"input": [{"role": "user", "content": ASK}, call.model_dump(), *output_of(call), ASK_AGAIN]},
    ):
        for answer in both(hermes, **going_on):
            assert answer.output_text == "Yes."
        assert prompt_of(hermes).endswith(f"user : {ASK}<|end|><|user|>{end}")


def test_calls_follow_the_text_of_their_message(hermes: RunningServer) -> None:
    say(hermes, f"Let me see. {CALL}{CALL}")
    (called, _) = both(hermes)
    outputs = [each for call in called.output[1:] for each in output_of(call)]  # type: ignore[arg-type]
    both(hermes, previous_response_id=called.id, input=outputs)
    assert "assistant : Let me see.Weather(Rome)Weather(Rome)<|end|>" in prompt_of(hermes)


@pytest.mark.parametrize("namespace", ["mcp__sky", "mcp__sky__"])
def test_functions_of_a_namespace_have_qualified_names(hermes: RunningServer, namespace: str) -> None:
    """Codex looks a call's function up by its namespace and name; two namespaces may have functions of one name."""
    tools = [
        {"type": "namespace", "name": name, "description": "", "tools": TOOLS[:1]} for name in (namespace, "indoors")
    ]
    choice = {"type": "function", "name": "mcp__sky__Weather"}
    for answer in both(hermes, tools=tools, tool_choice=choice):
        call = call_of(answer)
        assert (call.namespace, call.name) == (namespace, "Weather")
    city = Weather.model_validate_json(call.arguments).city
    end = f"assistant : mcp__sky__Weather({city})<|end|><|user|>tool mcp__sky__Weather: 20 C<|end|><|user|>user : Well?"
    say(hermes, "Yes.")
    for going_on in (
        {"previous_response_id": answer.id, "input": [*output_of(call), ASK_AGAIN]},
        {"input": [{"role": "user", "content": ASK}, call.model_dump(), *output_of(call), ASK_AGAIN], "tools": []},
    ):
        both(hermes, **{"tools": tools, **going_on})
        assert f"{end}<|end|>" in prompt_of(hermes)
    say(hermes, CALL)
    (plain, _) = both(hermes, tools=[*tools, TOOLS[0]])
    assert (call_of(plain).namespace, call_of(plain).name) == (None, "Weather")


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tools": [{"type": "namespace", "name": "a", "tools": TOOLS[:1] * 129}] * 2}, "tools has 258 func", "tools"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": TOOLS[:1]}] * 2},
            "tools has 'a__Weather' more",
            "tools",
        ),
        ({"tools": [TOOLS[0]] * 2, "tool_choice": "required"}, "tools has 'Weather' more than once", "tools"),
        ({"tool_choice": "required"}, "a tool must be called, but tools has no tools", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: the type is 'web_search'; this server takes tools", None),
        ({"tools": [{**TOOLS[0], "strict": 1}]}, "tools[0].strict is 1; it should be a valid boolean", None),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input: a chat needs at least one message", "input"),
        (
            {"input": [{"type": "function_call_output", "output": "a"}]},
            "input[0].call_id is missing",
            "input[0].call_id",
        ),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_bad_bodies_are_refused(hermes: RunningServer, fields: dict[str, Any], message: str, param: str | None) -> None:
    response = hermes.http.post(RESPONSES, json={"input": ASK, "max_output_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param
