"""Recorded requests of agents that are not Python packages, or are too large to install."""

import json
from typing import Any

import pytest

from tests.agents.turns import (
    ANSWER,
    ANSWERING,
    CALLED,
    CALLED_TWICE,
    CALLING_TWICE,
    QUESTION,
    REASONING,
    REASONING_BEFORE,
    RETURNED,
    RETURNED_TWICE,
    SECOND_REASONING,
    TOOL,
    plan,
    prompts_of,
)
from tests.server.serving import RunningServer

WHOLE_NUMBER = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
OPENCODE: dict[str, Any] = {
    "model": "stories",
    "max_tokens": 300,
    "temperature": 0.5,
    "reasoning_effort": "low",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a city.",
                "parameters": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": WHOLE_NUMBER},
                    "required": ["city", "days"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""As opencode asks, by way of Vercel's AI SDK (recorded of `ai` 6.0.326 and `@ai-sdk/openai-compatible` 2.0.92)."""

AIDER: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Act as an expert software developer."},
        {"role": "user", "content": "Change get_factorial() to use math.factorial"},
        {"role": "assistant", "content": "app.py\n<<<<<<< SEARCH\n=======\nimport math\n>>>>>>> REPLACE"},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "app.py\n```\nx = 1\n```\nTell me a story."},
    ],
    "model": "stories",
    "stream": True,
    "temperature": 0,
    "reasoning_effort": "low",
}
"""As Aider asks, by way of LiteLLM (recorded of 1.110.2)."""


def streamed(server: RunningServer, body: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The message that a client assembles from the deltas, the finish reason, and the last chunk."""
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert "x-inflight-ignored-fields" not in response.headers
    *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts, calls = dict[str, str](), dict[int, dict[str, Any]]()
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            texts[name] = texts.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls") or []:
            known = calls.setdefault(call["index"], {"function": {"arguments": ""}})
            known |= {name: call[name] for name in ("id", "type", "index") if name in call}
            function = known["function"]
            function |= {"name": call["function"].get("name") or function.get("name")}
            function["arguments"] += call["function"].get("arguments") or ""
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    message = {"role": "assistant", **texts}
    return {**message, "tool_calls": list(calls.values())} if calls else message, reason, chunks[-1]


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("content", [None, ""])
def test_opencode_calls_tools_and_answers(server: RunningServer, content: str | None, has_index: bool) -> None:
    plan(server, CALLING_TWICE, ANSWERING)
    message, reason, last = streamed(server, OPENCODE)
    assert reason == "tool_calls"
    assert message["reasoning_content"] == REASONING
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"city": "Rome", "days": 2},
        {"city": "Paris", "days": 1},
    ]
    assert not last["choices"]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    calls = message["tool_calls"] if has_index else [{**call, "index": None} for call in message["tool_calls"]]
    said = {**message, "content": content, "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"sunny in {city}"}
        for call, city in zip(calls, ("Rome for 2 days", "Paris for 1 days"), strict=True)
    ]
    message, reason, _ = streamed(server, {**OPENCODE, "messages": [*OPENCODE["messages"], said, *results]})
    assert (message["content"], message["reasoning_content"], reason) == (ANSWER, SECOND_REASONING, "stop")
    assert f"{REASONING_BEFORE}{CALLED_TWICE}{RETURNED_TWICE}" in prompts_of(server)[-1]


def test_opencode_without_reasoning_is_answered(server: RunningServer) -> None:
    plan(server, ANSWER)
    asked = {name: value for name, value in OPENCODE.items() if name != "reasoning_effort"}
    assert streamed(server, asked)[:2] == ({"role": "assistant", "content": ANSWER, "reasoning_content": ""}, "stop")


def test_aider_is_answered(server: RunningServer) -> None:
    plan(server, ANSWERING)
    message, reason, _ = streamed(server, AIDER)
    assert message == {"role": "assistant", "content": ANSWER, "reasoning_content": SECOND_REASONING}
    assert reason == "stop"
    assert "<|im_start|>assistant\nOk.<|im_end|>\n<|im_start|>user\napp.py\n```\nx = 1\n```" in prompts_of(server)[0]


def test_what_litellm_sends_back_of_a_message_is_taken(server: RunningServer) -> None:
    call = {"function": {"arguments": '{"city": "Rome", "days": 2}', "name": "get_weather"}, "id": "call_1"}
    said = {
        "content": None,
        "role": "assistant",
        "tool_calls": [{**call, "type": "function", "index": 1}],
        "function_call": None,
        "reasoning_content": REASONING,
        "thinking_blocks": [{"type": "thinking", "thinking": REASONING, "signature": "unsigned"}],
        "provider_specific_fields": {"reasoning": REASONING},
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny in Rome for 2 days"}
    plan(server, ANSWERING)
    body = {"model": "stories", "messages": [{"role": "user", "content": QUESTION}, said, result], "tools": [TOOL]}
    message, _, _ = streamed(server, {**body, "stream": True})
    assert message["content"] == ANSWER
    assert f"{REASONING_BEFORE}{CALLED}{RETURNED}" in prompts_of(server)[0]
