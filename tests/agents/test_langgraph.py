"""A graph of LangGraph with LangChain's model of OpenAI, through chat completions and through responses."""

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

langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make agents")
graphs = pytest.importorskip("langgraph.graph", reason="langgraph is not installed: make agents")
prebuilt = pytest.importorskip("langgraph.prebuilt", reason="langgraph is not installed: make agents")

APIS = ["chat", "responses"]


class Forecast(BaseModel):
    """What a model returns."""

    city: str
    is_sunny: bool


FORECAST = '<think>\nSunny.\n</think>\n\n{"city": "Rome", "is_sunny": true}'
CALL_OF_FORECAST = f'<tool_call>\n{{"name": "Forecast", "arguments": {FORECAST.splitlines()[-1]}}}\n</tool_call>'


def model_of(server: RunningServer, api: str, **options: Any) -> Any:
    return langchain.ChatOpenAI(
        model="stories",
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=api == "responses",
        stream_usage=True,
        **options,
    )


def agent_of(model: Any, weather: Weather, **options: Any) -> Any:
    """A graph: the model, then its calls, until there are none."""
    model = model.bind_tools([weather.get_weather], **options)
    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", prebuilt.ToolNode([weather.get_weather]))
    graph.add_edge(graphs.START, "model")
    graph.add_conditional_edges("model", prebuilt.tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def run(agent: Any, stream: bool, asked: Any = QUESTION) -> tuple[list[Any], str]:
    """The messages, and the text that was streamed."""
    begin = {"messages": [("system", "Be brief."), ("user", asked)] if isinstance(asked, str) else asked}
    if not stream:
        return agent.invoke(begin)["messages"], ""
    messages, text = [], ""
    for mode, update in agent.stream(begin, stream_mode=["values", "messages"]):
        if mode == "values":
            messages = update["messages"]
        elif update[0].type == "AIMessageChunk":
            text += update[0].text
    return messages, text


def reasoning_in(messages: list[Any]) -> list[str]:
    """The reasoning, for all that LangChain reads of it: nothing in chat completions or in streams."""
    blocks = [block for each in messages if isinstance(each.content, list) for block in each.content]
    return ["".join(part["text"] for part in block["content"]) for block in blocks if block["type"] == "reasoning"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_graph_calls_a_tool_and_answers(server: RunningServer, weather: Weather, api: str, stream: bool) -> None:
    plan(server, CALLING, ANSWERING)
    messages, text = run(agent_of(model_of(server, api), weather), stream)
    assert weather.asked == [("Rome", 2)]
    assert messages[-1].text == ANSWER
    assert text == (ANSWER if stream else "")
    assert messages[-1].usage_metadata["output_token_details"]["reasoning"] > 0
    first, second = prompts_of(server)
    assert QUESTION in first
    assert f"{CALLED}{RETURNED}" in second


def test_reasoning_comes_back_in_responses(server: RunningServer, weather: Weather) -> None:
    plan(server, CALLING, ANSWERING)
    messages, _ = run(agent_of(model_of(server, "responses"), weather), stream=False)
    assert reasoning_in(messages) == [REASONING, SECOND_REASONING]
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_the_results_of_several_calls_come_back(
    server: RunningServer, weather: Weather, api: str, stream: bool
) -> None:
    plan(server, CALLING_TWICE, ANSWERING)
    assert run(agent_of(model_of(server, api), weather), stream)[0][-1].text == ANSWER
    assert sorted(weather.asked) == [("Paris", 1), ("Rome", 2)]
    assert f"{CALLED_TWICE}{RETURNED_TWICE}" in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_goes_on(server: RunningServer, weather: Weather, api: str, stream: bool) -> None:
    plan(server, CALLING, ANSWERING, "It never rains in Rome.")
    agent = agent_of(model_of(server, api), weather)
    history, _ = run(agent, stream)
    messages, _ = run(agent, stream, [*history, ("user", "And rain?")])
    assert messages[-1].text == "It never rains in Rome."
    assert f"{ANSWER}<|im_end|>\n<|im_start|>user\nAnd rain?<|im_end|>" in prompts_of(server)[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_remembers_the_conversation_if_asked_to(
    server: RunningServer, weather: Weather, stream: bool
) -> None:
    plan(server, CALLING, ANSWERING)
    agent = agent_of(model_of(server, "responses", use_previous_response_id=True), weather)
    assert run(agent, stream)[0][-1].text == ANSWER
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in prompts_of(server)[-1]


@pytest.mark.parametrize("kind", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("api", APIS)
def test_a_model_returns_a_form(server: RunningServer, api: str, kind: str) -> None:
    plan(server, CALL_OF_FORECAST if kind == "function_calling" else FORECAST)
    model = model_of(server, api).with_structured_output(Forecast, method=kind)
    assert model.invoke("JSON, please.") == Forecast(city="Rome", is_sunny=True)


@pytest.mark.parametrize("api", APIS)
def test_settings_of_a_model_are_taken(server: RunningServer, weather: Weather, api: str) -> None:
    plan(server, CALLING, ANSWERING)
    settings = {"max_tokens": 500, "temperature": 0.5, "reasoning_effort": "low"}
    agent = agent_of(model_of(server, api, **settings), weather, strict=True, parallel_tool_calls=False)
    assert run(agent, True)[0][-1].text == ANSWER
    assert weather.asked == [("Rome", 2)]
