"""LiteLLM, as of OpenAI's providers and as Anthropic's."""

import json
from typing import Any

import pytest

from tests.agents.turns import (
    ANSWER,
    ANSWERING,
    CALLED,
    CALLED_TWICE,
    CALLING,
    CALLING_TWICE,
    QUESTION,
    REASONING,
    REASONING_BEFORE,
    RETURNED,
    RETURNED_TWICE,
    SECOND_REASONING,
    TOOL,
    Weather,
    plan,
    prompts_of,
)
from tests.server.serving import RunningServer

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make agents")
litellm.telemetry = False
litellm.suppress_debug_info = True

PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


def ask(server: RunningServer, provider: str, stream: bool, messages: list[Any], **options: Any) -> Any:
    """The answer; if it is streamed, LiteLLM assembles it."""
    url = server.url if provider == "anthropic" else f"{server.url}/v1"
    answer = litellm.completion(
        model=f"{provider}/stories",
        api_base=url,
        api_key="none",
        messages=messages,
        stream=stream,
        max_tokens=300,
        max_retries=0,
        **options,
    )
    return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer


def run(server: RunningServer, provider: str, stream: bool, weather: Weather, messages: list[Any]) -> list[Any]:
    """Answer calls until there are none. Returns what the model said."""
    said = []
    while True:
        choice = ask(server, provider, stream, messages, tools=[TOOL]).choices[0]
        said.append(choice.message)
        messages.append(choice.message)
        assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        if not choice.message.tool_calls:
            return said
        for call in choice.message.tool_calls:
            result = weather.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_model_reasons_calls_a_tool_and_answers(
    server: RunningServer, weather: Weather, provider: str, stream: bool
) -> None:
    plan(server, CALLING, ANSWERING)
    first, second = run(server, provider, stream, weather, [{"role": "user", "content": QUESTION}])
    assert weather.asked == [("Rome", 2)]
    assert second.content == ANSWER
    assert [first.reasoning_content, second.reasoning_content] == [REASONING, SECOND_REASONING]
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_results_of_several_calls_come_back(
    server: RunningServer, weather: Weather, provider: str, stream: bool
) -> None:
    plan(server, CALLING_TWICE, ANSWERING)
    run(server, provider, stream, weather, [{"role": "user", "content": QUESTION}])
    assert weather.asked == [("Rome", 2), ("Paris", 1)]
    assert f"{REASONING_BEFORE}{CALLED_TWICE}{RETURNED_TWICE}" in prompts_of(server)[-1]


@pytest.mark.parametrize("then", PROVIDERS)
@pytest.mark.parametrize("first", PROVIDERS)
def test_a_conversation_goes_on_with_another_provider(
    server: RunningServer, weather: Weather, first: str, then: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for provider in (first, then):
        plan(server, CALLING_TWICE, ANSWERING)
        run(server, provider, False, weather, messages)
        messages.append({"role": "user", "content": "And later?"})
    assert weather.asked == [("Rome", 2), ("Paris", 1)] * 2
    assert prompts_of(server)[-1].count(f"{CALLED_TWICE}{RETURNED_TWICE}") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_read(server: RunningServer, stream: bool) -> None:
    plan(server, CALLING)
    tool = {"type": "function", **TOOL["function"]}
    asked = {"model": "openai/stories", "api_base": f"{server.url}/v1", "api_key": "none", "input": QUESTION}
    answer = litellm.responses(**asked, tools=[tool], stream=stream)
    if stream:
        (answer,) = [event.response for event in answer if event.type == "response.completed"]
    reasoning, call = answer.output
    assert reasoning.content[0].text == REASONING
    assert json.loads(call.arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_settings_of_a_model_are_taken(server: RunningServer, provider: str) -> None:
    plan(server, ANSWERING)
    settings: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "stop": ["zebra"], "tool_choice": "auto"}
    if provider != "anthropic":
        settings |= {"reasoning_effort": "low", "seed": 1, "parallel_tool_calls": False, "user": "somebody"}
    messages = [{"role": "user", "content": QUESTION}]
    answer = ask(server, provider, True, messages, tools=[TOOL], stream_options={"include_usage": True}, **settings)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens > 0
