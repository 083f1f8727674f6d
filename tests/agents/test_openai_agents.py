"""OpenAI's Agents SDK, through chat completions and through responses."""

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

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make agents")

APIS = ["chat", "responses"]


class Forecast(BaseModel):
    """What an agent returns."""

    city: str
    is_sunny: bool


def agent_of(server: RunningServer, api: str, weather: Weather, **options: Any) -> Any:
    """An agent that may look at the weather. Through chat completions, it sends reasoning back only where told to."""
    client = server.async_client
    model = (
        agents.OpenAIResponsesModel("stories", client)
        if api == "responses"
        else agents.OpenAIChatCompletionsModel("stories", client, should_replay_reasoning_content=lambda context: True)
    )
    tools = [agents.function_tool(weather.get_weather)]
    return agents.Agent("Weather", instructions="Be brief.", tools=tools, model=model, **options)


def run(agent: Any, stream: bool, asked: Any = QUESTION, **options: Any) -> tuple[Any, str]:
    """The result, and the text that was streamed."""

    async def run() -> tuple[Any, str]:
        if not stream:
            return await agents.Runner.run(agent, asked, **options), ""
        result = agents.Runner.run_streamed(agent, asked, **options)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return result, "".join(event.delta for event in events if event.type == "response.output_text.delta")

    return asyncio.run(run())


def reasoning_in(result: Any) -> list[str]:
    items = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    return ["".join(part.text for part in item.content or item.summary) for item in items]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_reasons_calls_a_tool_and_answers(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING, ANSWERING)
    result, text = run(agent_of(server, api, weather), stream)
    assert weather.asked == [("Rome", 2)]
    assert result.final_output == ANSWER
    assert text == (ANSWER if stream else "")
    assert reasoning_in(result) == [REASONING, SECOND_REASONING]
    first, second = prompts_of(server)
    assert QUESTION in first
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_the_results_of_several_calls_come_back(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING_TWICE, CALLING, ANSWERING)
    result, _ = run(agent_of(server, api, weather), stream)
    assert sorted(weather.asked) == [("Paris", 1), ("Rome", 2), ("Rome", 2)]
    assert result.final_output == ANSWER
    _, second, third = prompts_of(server)
    assert f"{REASONING_BEFORE}{CALLED_TWICE}{RETURNED_TWICE}" in second
    assert third.count(CALLED) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_remembers_the_conversation_if_asked_to(
    server: RunningServer, weather: Weather, stream: bool
) -> None:
    plan(server, CALLING, ANSWERING, "It never rains in Rome.")
    result, _ = run(agent_of(server, "responses", weather), stream, auto_previous_response_id=True)
    assert result.final_output == ANSWER
    last = {"previous_response_id": result.last_response_id}
    again, _ = run(agent_of(server, "responses", weather), stream, "And rain?", **last)
    assert again.final_output == "It never rains in Rome."
    _, second, third = prompts_of(server)
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in second
    assert f"{CALLED}{RETURNED}<|im_start|>assistant\n{ANSWERING}<|im_end|>" in third


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_with_a_tool_may_return_a_form(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING, '<think>\nSunny.\n</think>\n\n{"city": "Rome", "is_sunny": true}')
    result, _ = run(agent_of(server, api, weather, output_type=Forecast), stream)
    assert result.final_output == Forecast(city="Rome", is_sunny=True)
    assert len(prompts_of(server)) == 2


@pytest.mark.parametrize("api", APIS)
def test_a_tool_may_be_required(server: RunningServer, weather: Weather, api: str) -> None:
    plan(server, CALLING, ANSWERING)
    effort = agents.model_settings.Reasoning(effort="low", summary="auto")
    settings = agents.ModelSettings(
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0.5,
        max_tokens=500,
        store=False,
        reasoning=effort,
    )
    assert run(agent_of(server, api, weather, model_settings=settings), True)[0].final_output == ANSWER
    assert weather.asked == [("Rome", 2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_hands_over_to_another(server: RunningServer, weather: Weather, api: str, stream: bool) -> None:
    plan(server, '<tool_call>\n{"name": "transfer_to_weather", "arguments": {}}\n</tool_call>', CALLING, ANSWERING)
    expert = agent_of(server, api, weather)
    result, _ = run(agents.Agent("Desk", model=expert.model, handoffs=[expert]), stream)
    assert result.final_output == ANSWER
    assert result.last_agent is expert
    assert weather.asked == [("Rome", 2)]
    assert "transfer_to_weather {}" in prompts_of(server)[-1]
