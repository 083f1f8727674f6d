"""Random histories of the three APIs, with everything that clients and their newer versions put into them: each is
answered, or its wrong value is refused by the name of its message; and what was written of a history stays the same
when it grows.

python -m tests.server.fuzz_histories --cases 100_000 --seed 1
"""

import argparse
import json
import random
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any

import httpx2
import pytest

from inflight.demo_model import DEMO_MODEL
from inflight.server.anthropic.request import MessagesRequest
from inflight.server.chat_format.chat_template import render_chat
from inflight.server.chat_format.tools import with_calls_joined, with_names
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.responses.request import ResponsesRequest
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import validated
from inflight.server.wire.strict_model import READING, RequestParsing
from inflight.text.tokenizer import Tokenizer
from tests.server.chat_format.scripted import say, scripted_server

CHAT, RESPONSES, MESSAGES = APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
FIRST_ONLY = """{% for m in messages %}\
{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}\
{% endif %}[{{ m.role[0] }}]{{ m.content }}{% for call in m.tool_calls or [] %}\
{% for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}{% endfor %};\
{% endfor %}[a]"""
"""As Qwen's: a system message only at first, and arguments that are objects."""
ALTERNATING = """{% for m in messages[1:] if messages[0].role == 'system' %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}\
{% endif %}{% endfor %}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}[a]"""
"""As Mistral's and Gemma 3's."""
FREE = FIRST_ONLY.replace("not loop.first", "false").replace(
    "call.function.arguments | items", "[('a', call.function.arguments)]"
)
"""Takes system messages anywhere, and any arguments."""
SHORT_IDS = """{% set texts = messages[1:] if messages[0].role == 'system' else messages %}\
{% set ns = namespace(n=0) %}\
{% for m in texts %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}\
{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}\
{% for call in m.tool_calls or [] %}{% if call.id is not defined or call.id | length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
<{{ call.function.name }} {{ call.id }}>{% endfor %}{% if m.role == 'tool' %}\
{{ '' if m.tool_call_id | length == 9 else raise_exception('id') }}{% endif %};{% endfor %}[a]"""
"""As Mistral's later ones: texts alternate, and ids have nine characters."""
NO_TOOLS = """{% for m in messages %}{% if m.role == 'tool' or m.tool_calls %}\
{{ raise_exception('only users and assistants') }}{% endif %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}[a]"""
"""Knows no calls and no results."""
OWN = (DEMO_MODEL / "chat_template.jinja").read_text()
TEMPLATES = {
    "own": OWN,
    "first": FIRST_ONLY,
    "alternating": ALTERNATING,
    "free": FREE,
    "ids": SHORT_IDS,
    "no tools": NO_TOOLS,
}

WORDS = ("", "Hm.", "20 C", "a\nb", "  ", "{{ x }}", "\u200b", "été")
TYPES = (
    *("image_url", "input_audio", "refusal", "web_search_call", "local_shell_call", "local_shell_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "mcp_call", "mcp_approval_request", "computer_call"),
    *("computer_call_output", "file_search_call", "image_generation_call", "item_reference", "server_tool_use"),
    *("web_search_tool_result", "redacted_thinking", "document", "search_result", "container_upload", "quantum_v2"),
)
FIELDS = ("caller", "citations", "annotations", "phase", "audio", "function_call", "cache_control2", "contents", "\n")


class Histories:
    """Makes histories of one API."""

    def __init__(self, rng: random.Random, path: str) -> None:
        self.rng, self.path = rng, path
        self.calls: list[str] = []

    def word(self) -> str | None:
        return self.rng.choice(WORDS)

    def grown(self, given: dict[str, Any]) -> dict[str, Any]:
        """An object as it is, or with fields of a newer client."""
        for name in self.rng.sample(FIELDS, self.rng.choice((0, 0, 0, 1, 3))):
            given[name] = self.rng.choice((None, "x", 5, [], {"a": [1]}, {"type": "ephemeral"}))
        return given

    def without(self, given: dict[str, Any], *names: str) -> dict[str, Any]:
        """An object as it is, or with one of these fields null or absent."""
        if self.rng.random() < 0.2:
            name = self.rng.choice(names)
            given[name] = None
            if self.rng.random() < 0.5:
                del given[name]
        return given

    def unknown(self) -> dict[str, Any]:
        given: dict[str, Any] = {"type": self.rng.choice(TYPES)}
        for name in ("text", "name", "id", "call_id", "input", "output", "data", "content", "encrypted_content"):
            if self.rng.random() < 0.2:
                given[name] = self.rng.choice(("x", "", {"a": 1}, [1], 5))
        return given

    def text_part(self, role: str) -> dict[str, Any]:
        kind = "text"
        if self.path == RESPONSES:
            kind = "output_text" if role == "assistant" else "input_text"
        return self.grown(self.without({"type": kind, "text": self.word()}, "text"))

    def content(self, role: str) -> Any:
        kind = self.rng.random()
        if kind < 0.4:
            return self.word()
        if kind < 0.5:
            return self.rng.choice((None, [], ""))
        return [self.rng.choice((self.text_part(role), self.unknown())) for _ in range(self.rng.randint(1, 3))]

    def arguments(self) -> str | None:
        return self.rng.choice(('{"a": 1}', "{}", "", '{"a": ', "[]", "null", "5", '"x"', None))

    def new_id(self) -> str:
        self.calls.append(self.rng.choice(("c1", "call_", "", "abcdefghi", "a b")) + str(self.rng.randint(0, 9)))
        return self.calls[-1]

    def old_id(self) -> str:
        return self.rng.choice([*self.calls, "nothing"])

    def turn(self) -> dict[str, Any]:
        made = {CHAT: self.chat_message, RESPONSES: self.item, MESSAGES: self.anthropic_message}[self.path]()
        return self.grown(made)

    def chat_message(self) -> dict[str, Any]:
        role = self.rng.choice(("system", "developer", "user", "user", "assistant", "assistant", "tool"))
        message = self.without({"role": role, "content": self.content(role)}, "content")
        if role == "tool":
            return self.without({**message, "tool_call_id": self.old_id()}, "tool_call_id")
        if role == "assistant" and self.rng.random() < 0.3:
            message[self.rng.choice(("reasoning_content", "reasoning"))] = self.word()
        if role == "assistant" and self.rng.random() < 0.5:
            message["tool_calls"] = [self.chat_call() for _ in range(self.rng.randint(0, 2))]
        return message

    def chat_call(self) -> dict[str, Any]:
        if self.rng.random() < 0.2:
            kind = self.rng.choice(("custom", "mcp"))
            inner = self.rng.choice(
                ({"name": "patch", "input": "x"}, {"name": None}, None, "x", {"name": 5, "input": {}})
            )
            return self.without({"id": self.new_id(), "type": kind, kind: inner}, "id")
        function = self.without({"name": self.rng.choice(("f", "", "a.b", "{{ x }}"))}, "name")
        function = self.without({**function, "arguments": self.arguments()}, "arguments")
        call = {"id": self.new_id(), "type": "function", "function": self.grown(function)}
        return self.grown(self.without(call, "id", "type"))

    def item(self) -> dict[str, Any]:
        kind = self.rng.random()
        if kind < 0.4:
            role = self.rng.choice(("system", "developer", "user", "user", "assistant"))
            message = self.without({"type": "message", "role": role}, "type")
            return self.without({**message, "content": self.content(role), "status": "completed"}, "content", "status")
        if kind < 0.55:
            call = {"type": "function_call", "call_id": self.new_id(), "name": "f", "arguments": self.arguments()}
            return self.without({**call, "namespace": "mcp"}, "call_id", "name", "arguments", "namespace")
        if kind < 0.7:
            result = {"type": "function_call_output", "call_id": self.old_id(), "output": self.content("tool")}
            return self.without(result, "call_id", "output")
        if kind < 0.85:
            parts = [{"type": self.rng.choice(("summary_text", "reasoning_text", "x")), "text": self.word()}]
            thought = {"type": "reasoning", "id": "rs_1", "summary": self.rng.choice(([], parts)), "content": parts}
            return self.without(
                {**thought, "encrypted_content": self.word()}, "summary", "content", "encrypted_content"
            )
        return self.unknown()

    def anthropic_message(self) -> dict[str, Any]:
        role = self.rng.choice(("user", "user", "assistant", "assistant", "system"))
        if self.rng.random() < 0.5:
            return self.without({"role": role, "content": self.content(role)}, "content")
        return {"role": role, "content": [self.block() for _ in range(self.rng.randint(0, 3))]}

    def block(self) -> dict[str, Any]:
        kind = self.rng.randint(0, 4)
        if kind == 0:
            return self.unknown()
        if kind == 1:
            return self.grown(self.without({"type": "thinking", "thinking": self.word(), "signature": "x"}, "thinking"))
        if kind == 2:
            used = {
                "type": "tool_use",
                "id": self.new_id(),
                "name": "f",
                "input": self.rng.choice(({}, {"a": 1}, "{", 5)),
            }
            return self.grown(self.without(used, "id", "name", "input"))
        if kind == 3:
            result = {"type": "tool_result", "tool_use_id": self.old_id(), "content": self.content("tool")}
            return self.grown(self.without(result, "tool_use_id", "content"))
        return self.text_part("user")

    def spoiled(self, history: list[dict[str, Any]]) -> str:
        """Give a message a wrong value; its name."""
        index = self.rng.randrange(len(history))
        wrong: list[dict[str, Any]] = [{"role": "foo"}, {"role": 5}, {"content": 5}, {"content": [5]}]
        wrong += [
            {"content": [{**self.text_part("user"), "text": 5}]},
            {"content": [{"type": 5}]},
            {"content": {"text": "x"}},
        ]
        history[index] = {"type": "message", "role": "user", "content": "x", **self.rng.choice(wrong)}
        if self.path != RESPONSES:
            del history[index]["type"]
        return f"{'input' if self.path == RESPONSES else 'messages'}[{index}]"


def body_of(path: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    """A request with this history."""
    if path == RESPONSES:
        return {"input": history, "max_output_tokens": 3}
    return {"messages": history, "max_tokens": 3}


def rendered(path: str, history: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    """The text of a history, read as a request of its own. Raises `ApiError`."""
    return copy_context().run(_rendered, path, history, tokenizer)


def _rendered(path: str, history: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    READING.set(RequestParsing())
    models = {CHAT: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest}
    body: Any = validated(models[path], json.loads(json.dumps(body_of(path, history))))
    chat: Mapping[str, Any] = body.for_template(ServerSettings())
    if path == RESPONSES:
        chat = {**chat, "messages": with_names(with_calls_joined(body.messages))}
    return render_chat(chat, tokenizer, "messages")


def check_case(seed: int, tokenizer: Tokenizer, http: httpx2.Client | None = None) -> None:
    """Check one random history, through a server's client, if it is given."""
    rng = random.Random(seed)
    path, template = rng.choice(APIS), rng.choice(list(TEMPLATES))
    tokenizer.inner.chat_template = TEMPLATES[template]
    made = Histories(rng, path)
    history = [made.turn() for _ in range(rng.choice((1, 2, 3, 5, 9)))]
    wrong = made.spoiled(history) if rng.random() < 0.1 else None
    where = f"seed {seed}, {path}, {template}: {json.dumps(history)}"
    if http is not None:
        answer = http.post(path, json=body_of(path, history))
        assert answer.status_code == (200 if wrong is None else 400), (answer.text, where)
        assert wrong is None or wrong in answer.text, (answer.text, where)
        return
    if wrong is not None:
        with pytest.raises(ApiError) as refused:
            rendered(path, history, tokenizer)
        assert wrong in str(refused.value), (str(refused.value), where)
        return
    rendered(path, history, tokenizer)
    more = [{"role": role, "content": text} for role, text in (("user", "X"), ("assistant", "Y"), ("user", "Z"))]
    asked, grown = rendered(path, [*history, more[0]], tokenizer), rendered(path, [*history, *more], tokenizer)
    assert grown.startswith(asked), (asked, grown, where)


def main() -> None:
    """Check, and print what fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    num_failed = 0
    with scripted_server(FREE) as server:
        say(server, "Yes.")
        tokenizer = server.llm.tokenizer
        assert tokenizer is not None
        for number in range(arguments.cases):
            try:
                check_case(arguments.seed * 10**9 + number, tokenizer, server.http if number % 100 == 0 else None)
            except Exception as error:  # all of them are counted
                num_failed += 1
                if num_failed <= 20:
                    print(f"seed {arguments.seed * 10**9 + number}: {type(error).__name__}: {error}"[:3000], flush=True)
    print(f"{arguments.cases:,} histories: {num_failed} failed")
    if num_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
