"""Requests as real clients send them: fields that cannot change the answer are ignored and reported; others are
refused."""

import json
import logging
from typing import Any

import pytest

from inflight import AsyncLLM
from tests.server.serving import HELLO, RunningServer

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 3},
    CHAT: {"messages": HELLO, "max_tokens": 3},
    RESPONSES: {"input": "A story, please.", "max_output_tokens": 3},
    MESSAGES: {"messages": HELLO, "max_tokens": 3},
}
FUNCTION = {"name": "shell", "description": "Run a command", "parameters": {"type": "object", "properties": {}}}

CODEX = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A story, please."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": True},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [{"type": "custom", "name": "patch"}, {"type": "function", **FUNCTION}],
        },
    ],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
    "max_output_tokens": 3,
}
"""The form in which Codex CLI asks."""

CACHED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
CLAUDE_CODE = {
    "max_tokens": 3,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.97; cc_entrypoint=cli; cch=00000;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "A story, please.", "cache_control": CACHED}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, {"type": "text", "text": "Once"}],
        },
        {"role": "user", "content": "Go on."},
    ],
    "tools": [
        {"name": "Bash", "description": "Run a command", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": {"type": "none"},
    "metadata": {"user_id": "user_1", "session": "s"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "betas": ["interleaved-thinking-2025-05-14"],
}
"""The form in which Claude Code asks."""


def ignored_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[str]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    names = response.headers.get("x-inflight-ignored-fields")
    return names.split(", ") if names else []


@pytest.mark.parametrize("stream", [False, True])
def test_requests_in_the_form_of_codex_are_answered(server: RunningServer, stream: bool) -> None:
    assert set(ignored_of(server, RESPONSES, {**CODEX, "stream": stream})) == {
        *("tools[1].custom", "tools[2].web_search", "tools[0].custom", "description"),
        *("verbosity", "summary", "client_metadata"),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_requests_in_the_form_of_claude_code_are_answered(server: RunningServer, stream: bool) -> None:
    assert set(ignored_of(server, MESSAGES, {**CLAUDE_CODE, "stream": stream})) == {
        *("defer_loading", "tools[1].web_search_20250305", "session", "context_management", "betas"),
        "x-anthropic-billing-header",
    }


@pytest.mark.parametrize("path", list(ASK))
def test_a_field_of_a_newer_client_is_ignored_and_said_to_be(
    server: RunningServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.INFO, "inflight.server"):
        assert ignored_of(server, path, {**ASK[path], "quantum_hints": {"a": [1]}, "\u200b\n": 1}) == [
            "quantum_hints",
            "(an odd name)",
        ]
    said = [record.getMessage() for record in caplog.records if record.name == "inflight.server"]
    assert said == ["ignored fields of a request: quantum_hints, (an odd name)"]
    assert ignored_of(server, path, ASK[path]) == []


def test_many_messages_may_have_the_same_ignored_field(server: RunningServer) -> None:
    part = {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}] * 65
    assert ignored_of(server, CHAT, {"messages": messages, "max_tokens": 1}) == ["cache_control"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"temprature": 0}),
        (COMPLETIONS, {"max_new_tokens": 5}),
        (COMPLETIONS, {"messages": HELLO}),
        (COMPLETIONS, {"suffix": "the end"}),
        (COMPLETIONS, {"stream_options": {"include_usage": True, "more": 1}}),
        (CHAT, {"max_output_tokens": 5}),
        (CHAT, {"web_search_options": {}}),
        (CHAT, {"audio": {"voice": "alloy"}}),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": "required"}),
        (CHAT, {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
        (RESPONSES, {"max_tokens": 5}),
        (RESPONSES, {"prompt": {"id": "1"}}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}),
        (MESSAGES, {"stop": "a"}),
        (MESSAGES, {"mcp_servers": [{"type": "url", "url": "http://a", "name": "b"}]}),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}),
    ],
)
def test_what_would_change_the_answer_is_refused(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    response = server.http.post(path, json={**ASK[path], **fields})
    assert response.status_code == 400, response.text


def test_strict_are_refused_by_name() -> None:
    with RunningServer(AsyncLLM(num_blocks=200), strict=True) as server:
        for path, body, name in ((RESPONSES, CODEX, "client_metadata"), (MESSAGES, CLAUDE_CODE, "betas")):
            response = server.http.post(path, json={**ASK[path], name: body[name]})
            assert response.status_code == 400
            assert name in json.dumps(response.json())
        assert server.http.post(COMPLETIONS, json={**ASK[COMPLETIONS], "quantum_hints": 1}).status_code == 400
