"""The four APIs from a client's side: requests and answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
PROMPTS = ("Tell me a story about a fox.", "One morning")
SHORT, LONG, ENDLESS = 24, 160, 900
FLAGS = {
    "type": "object",
    "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1000}},
    "required": ["flags"],
    "additionalProperties": False,
}
"""More tokens than the context holds, so the engine generates until it is stopped."""

Json: TypeAlias = dict[str, Any]


def question(path: str, prompt: str, max_tokens: int) -> Json:
    """The body of a request. From `LONG` on, the answer does not end before its limit."""
    body: Json = {"temperature": 0, "max_output_tokens" if path == RESPONSES else "max_tokens": max_tokens}
    if path == COMPLETIONS:
        body["prompt"] = prompt
    elif path == RESPONSES:
        body["input"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if max_tokens >= LONG:
        flags = {"type": "json_schema", "schema": FLAGS}
        ways = {
            RESPONSES: {"text": {"format": flags | {"name": "flags"}}},
            MESSAGES: {"output_config": {"format": flags}},
        }
        body |= ways.get(path, {"ignore_eos": True})
    return body


def text_of(path: str, answer: Json) -> str:
    """The text of a whole answer."""
    if path in (COMPLETIONS, CHAT):
        (choice,) = answer["choices"]
        return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    (block,) = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return str(block["text"])


def piece_of(path: str, event: Json) -> str:
    """The text in one event of a stream."""
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in event["choices"])
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if path == RESPONSES:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


GOOD_ENDS = {"message_stop", "response.completed", "response.incomplete"}


@dataclass
class Answer:
    """What a client got.

    Attributes:
        text: the text received so far.
        is_whole: whether the answer ended normally.
        error: the reported error, if there was one.
    """

    status: int
    text: str = ""
    is_whole: bool = False
    error: Json = field(default_factory=dict)


async def ask(client: aiohttp.ClientSession, path: str, body: Json, began: Callable[[], None] = lambda: None) -> Answer:
    """Send a request and read the answer to its end; `began` is called when its first text has arrived."""
    async with client.post(path, json=body) as response:
        answer = Answer(response.status)
        if response.content_type != "text/event-stream":
            told = await response.json()
            answer.error = told.get("error") or {}
            if not answer.error:
                answer.text, answer.is_whole = text_of(path, told), True
        else:
            async for line in response.content:
                assert not answer.is_whole or not line.strip(), "something came behind the end"
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    answer.is_whole = True
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                answer.error = event.get("error") or event.get("response", {}).get("error") or {}
                if answer.error:
                    continue
                if piece := piece_of(path, event):
                    answer.text += piece
                    began()
                answer.is_whole = event.get("type") in GOOD_ENDS
    return answer
