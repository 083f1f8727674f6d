"""Tool calls and their results as chat templates expect them: in OpenAI's form, except that arguments are parsed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def call_for_template(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """Return a member of a message's `tool_calls`. Arguments that are not JSON stay the text that they are: a call that
    was cut off comes back with its tool's complaint, and an agent could not go on if it were refused."""
    try:
        parsed = json.loads(arguments or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair is no text for a tokenizer
    except (ValueError, RecursionError):
        parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def with_calls_joined(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages; the assistant's consecutive calls, the text before them, and the thought before all
    become one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined and joined[-1]["role"] == message["role"] == "assistant" else None
        if last is not None and "tool_calls" in message:
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif last is not None and last.keys() == {"role", "content", "reasoning_content"} and not last["content"]:
            thoughts = (last["reasoning_content"], message.get("reasoning_content"))
            joined[-1] = {**message, "reasoning_content": "\n\n".join(filter(None, thoughts))}
        else:
            joined.append(dict(message))
    return joined


def with_names(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages; tool results get the name of the called tool, which some templates need."""
    called: dict[str, str] = {}
    named = []
    for message in messages:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = called.get(message.get("tool_call_id", ""))
        is_named = message["role"] == "tool" and name is not None and "name" not in message
        named.append({**message, "name": name} if is_named else dict(message))
    return named
