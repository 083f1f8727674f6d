"""How many tokens of a prompt are computed in each of ten turns, for chat templates and the three APIs.

python -m tests.agents.session_tokens [--templates FOLDER]

A puppet answers as the chat template writes answers, but for the spelling of its arguments; the client sends back what
it got. Turns 5 and 10 end with a text, so turn 6 begins with a new question: where a template drops earlier reasoning,
that turn computes everything behind the question before.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.agents.puppet import Puppet, puppet_server
from tests.server.chat_format.templates import TEMPLATES
from tests.server.serving import RunningServer

APIS = ("chat completions", "messages", "responses")
NUM_TURNS, ENDS = 10, (4, 9)
FUNCTION: dict[str, Any] = {"name": "read_file", "description": "Reads a file."}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "number"}}}
TOOL = {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}
VARIABLES = {"bos_token": "", "eos_token": "", "enable_thinking": True, "thinking": True}


class Session:
    """One conversation over one API: what the client sends, and what the model says."""

    def __init__(self, server: RunningServer, api: str) -> None:
        assert isinstance(server.llm, Puppet)
        self._server, self._api, self._llm = server, api, server.llm
        self.history: list[dict[str, Any]] = [{"role": "user", "content": f"By {api}: read the files."}]

    def run(self) -> list[tuple[int, int]]:
        """For each turn, the tokens of its prompt, and how many of them were cached."""
        for turn in range(NUM_TURNS):
            self._server.wait_for_idle_work()
            said: dict[str, Any] = {"content": f"Turn {turn} is done." if turn in ENDS else ""}
            said["reasoning_content"] = f"I think about turn {turn}, and go on."
            if turn not in ENDS:
                arguments = {"path": f"/tmp/file {turn}.txt", "lines": 2.5}
                call = {"type": "function", "function": {"name": "read_file", "arguments": arguments}}
                said["tool_calls"] = [{**call, "id": f"functions.read_file:{turn}"}]
            self._llm.script = [lambda prompt, said=said: written(self._template, prompt, said)]
            answer = getattr(self, f"_{self._api.replace(' ', '_')}")()
            self.history += answer
            if turn in ENDS:
                self.history.append({"role": "user", "content": "Read more of them."})
        return [(each.num_prompt_tokens, each.num_cached_tokens) for each in self._llm.answered]

    @property
    def _template(self) -> str:
        assert self._llm.tokenizer is not None
        return str(self._llm.tokenizer.inner.chat_template)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def _chat_completions(self) -> list[dict[str, Any]]:
        body = {"messages": self.history, "tools": [TOOL]}
        message = self._post("/v1/chat/completions", body)["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        return [message, *({"role": "tool", "tool_call_id": each["id"], "content": "A line."} for each in calls)]

    def _messages(self) -> list[dict[str, Any]]:
        tool = {**FUNCTION, "input_schema": SCHEMA}
        body = {"messages": self.history, "tools": [tool], "max_tokens": 4000}
        content = self._post("/v1/messages", body)["content"]
        calls = [each for each in content if each["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "A line."} for each in calls]
        return [{"role": "assistant", "content": content}, *([{"role": "user", "content": results}] if results else [])]

    def _responses(self) -> list[dict[str, Any]]:
        tool = {"type": "function", **FUNCTION, "parameters": SCHEMA}
        output = self._post("/v1/responses", {"input": self.history, "tools": [tool]})["output"]
        calls = [each for each in output if each["type"] == "function_call"]
        return [*output, *({**_RESULT, "call_id": each["call_id"]} for each in calls)]


_RESULT = {"type": "function_call_output", "output": "A line."}


def written(template: str, prompt: str, said: dict[str, Any]) -> str:
    """An answer as a chat template writes it behind a user's message, from where the prompt ends; arguments in JSON
    have other spaces and another spelling of numbers than the template's."""

    def rendered(message: dict[str, Any]) -> str:
        chat = [{"role": "user", "content": "?!"}, {"role": "assistant", **message}]
        (text, *_), _ = render_jinja_template([chat], chat_template=template, tools=[TOOL], **VARIABLES)
        return str(text).rpartition("?!")[2]

    end = rendered({"content": "!?"}).rpartition("!?")[2]
    try:
        text = rendered(said)
    except Exception:  # Mistral's ids are shorter
        text = rendered({**said, "tool_calls": [{**each, "id": "123456789"} for each in said["tool_calls"]]})
    text = text[: -len(end)] if end and text.endswith(end) else text
    begun = next((size for size in range(min(len(text), len(prompt)), 0, -1) if prompt.endswith(text[:size])), 0)
    return text[begun:].replace('", "lines": 2.5', '","lines":2.50').rstrip() or "Nothing."


def computed(server: RunningServer, template: str, api: str) -> list[int]:
    """The tokens that each turn's prompt had to compute."""
    assert isinstance(server.llm, Puppet)
    assert server.llm.tokenizer is not None
    server.llm.tokenizer.inner.chat_template = template
    server.llm.play([], mark="")
    return [num_tokens - num_cached for num_tokens, num_cached in Session(server, api).run()]


def templates_in(folder: Path | None) -> Iterator[tuple[str, str]]:
    if folder is None:
        yield from TEMPLATES.items()
    else:
        yield from ((path.stem, path.read_text()) for path in sorted(folder.glob("*.jinja")))


def main(given: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, help="a folder of *.jinja, instead of the tests' own")
    arguments = parser.parse_args(given)
    print(f"| template | API | {' | '.join(f'turn {n + 1}' for n in range(NUM_TURNS))} |")
    print(f"|---|---|{'---:|' * NUM_TURNS}")
    with puppet_server() as server:
        for name, template in templates_in(arguments.templates):
            for api in APIS:
                try:
                    row = " | ".join(map(str, computed(server, template, api)))
                except Exception as error:
                    row = f"{type(error).__name__}: {json.dumps(str(error))[:60]}"
                print(f"| {name} | {api} | {row} |", flush=True)


if __name__ == "__main__":
    main()
