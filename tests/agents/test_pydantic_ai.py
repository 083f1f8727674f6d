"""Pydantic AI, through chat completions and through responses."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

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
    Weather,
    plan,
    prompts_of,
)
from tests.server.serving import RunningServer

WHY = "pydantic-ai-slim is not installed: make agents"
ai = pytest.importorskip("pydantic_ai", reason=WHY)
models = pytest.importorskip("pydantic_ai.models.openai", reason=WHY)
providers = pytest.importorskip("pydantic_ai.providers.openai", reason=WHY)

APIS = ["chat", "responses"]


class Forecast(BaseModel):
    """What an agent returns."""

    city: str
    is_sunny: bool


FORECAST = '{"city": "Rome", "is_sunny": true}'
FINAL_RESULT = f'<tool_call>\n{{"name": "final_result", "arguments": {FORECAST}}}\n</tool_call>'


def agent_of(server: RunningServer, api: str, weather: Weather, **options: Any) -> Any:
    kind = {"chat": models.OpenAIChatModel, "responses": models.OpenAIResponsesModel}[api]
    model = kind("stories", provider=providers.OpenAIProvider(openai_client=server.async_client))
    return ai.Agent(model, instructions="Be brief.", tools=[weather.get_weather], **options)


def run(agent: Any, stream: bool, asked: str = QUESTION, **options: Any) -> Any:
    """The result; if it is streamed, its output is what the last piece had."""

    async def run() -> Any:
        if not stream:
            return await agent.run(asked, **options)
        async with agent.run_stream(asked, **options) as result:
            outputs = [output async for output in result.stream_output(debounce_by=None)]
            assert outputs[-1] == await result.get_output()
            result.output = outputs[-1]
            return result

    return asyncio.run(run())


def reasoning_in(result: Any) -> list[str]:
    parts = [part for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"]
    return [part.content or "".join(part.provider_details["raw_content"]) for part in parts]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_reasons_calls_a_tool_and_answers(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING, ANSWERING)
    result = run(agent_of(server, api, weather), stream)
    assert weather.asked == [("Rome", 2)]
    assert result.output == ANSWER
    assert reasoning_in(result) == [REASONING, SECOND_REASONING]
    first, second = prompts_of(server)
    assert QUESTION in first
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_the_results_of_several_calls_come_back(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING_TWICE, ANSWERING)
    assert run(agent_of(server, api, weather), stream).output == ANSWER
    assert sorted(weather.asked) == [("Paris", 1), ("Rome", 2)]
    assert f"{REASONING_BEFORE}{CALLED_TWICE}{RETURNED_TWICE}" in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_goes_on(server: RunningServer, weather: Weather, api: str, stream: bool) -> None:
    plan(server, CALLING, ANSWERING, "It never rains in Rome.")
    history = run(agent_of(server, api, weather), stream).all_messages()
    again = run(agent_of(server, api, weather), stream, "And rain?", message_history=history)
    assert again.output == "It never rains in Rome."
    expected = f"{REASONING_BEFORE}{CALLED}{RETURNED}<|im_start|>assistant\n{ANSWERING}<|im_end|>"
    assert expected in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput", "PromptedOutput"])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_with_a_tool_may_return_a_form(
    server: RunningServer, weather: Weather, api: str, kind: str, stream: bool
) -> None:
    plan(server, CALLING, f"<think>\nSunny.\n</think>\n\n{FINAL_RESULT if kind == 'ToolOutput' else FORECAST}")
    result = run(agent_of(server, api, weather, output_type=getattr(ai, kind)(Forecast)), stream)
    assert result.output == Forecast(city="Rome", is_sunny=True)
    assert weather.asked == [("Rome", 2)]
    assert len(prompts_of(server)) == 2


@pytest.mark.parametrize("api", APIS)
def test_wrong_arguments_are_sent_back_to_the_model(server: RunningServer, weather: Weather, api: str) -> None:
    plan(server, CALLING.replace('"days": 2', '"days": "two"'), CALLING, ANSWERING)
    assert run(agent_of(server, api, weather), True).output == ANSWER
    assert weather.asked == [("Rome", 2)]
    assert "valid integer" in prompts_of(server)[1]


@pytest.mark.parametrize("api", APIS)
def test_settings_of_a_model_are_taken(server: RunningServer, weather: Weather, api: str) -> None:
    plan(server, CALLING, ANSWERING)
    settings = {
        "max_tokens": 500,
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
        "thinking": "low",
        "openai_reasoning_effort": "low",
        "openai_user": "somebody",
        "openai_store": False,
    }
    assert run(agent_of(server, api, weather, model_settings=settings), True).output == ANSWER
