"""Calls and their answers as chat templates take them: in OpenAI's form, but for arguments, which are parsed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from inflight.server.wire.api_errors import ApiError


def call_for_template(call_id: str | None, name: str, arguments: str, where: str) -> dict[str, Any]:
    """A member of a message's `tool_calls`. Raises `ApiError`, which says `where`, if `arguments` is not JSON."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where} has a tool call whose arguments are not JSON: {error}", param=where) from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def with_calls_joined(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat; calls that follow the assistant's text, or one another, in one message with it."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            last = joined[-1]
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            joined.append(dict(message))
    return joined


def with_names(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat; answers of tools with the name of what was called, which some templates want to know."""
    called: dict[str, str] = {}
    named = []
    for message in messages:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = called.get(message.get("tool_call_id", ""))
        is_named = message["role"] == "tool" and name is not None and "name" not in message
        named.append({**message, "name": name} if is_named else dict(message))
    return named
