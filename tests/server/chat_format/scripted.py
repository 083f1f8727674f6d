"""Tools for tests, templates that describe them, and a model with scripted answers."""

import random
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel

from inflight import AsyncLLM
from inflight.contracts.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, TextDelta
from tests.server.serving import RunningServer

HERMES_TEMPLATE = """{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>{% endif %}\
{% for message in messages %}<|user|>{{ message.role }} {{ message.name }}: {{ message.content }}\
{% for call in message.tool_calls or [] %}\
{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}<|end|>{% endfor %}<|assistant|>"""
LLAMA_TEMPLATE = """{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer {"name": function name, "parameters": its arguments}, or <|python_tag|>{% endif %}\
{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"""
UNKNOWN_TEMPLATE = HERMES_TEMPLATE.replace("tool_call>", "do>")
TEMPLATES = {"hermes": HERMES_TEMPLATE, "llama3": LLAMA_TEMPLATE, "unknown": UNKNOWN_TEMPLATE}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Paris"]
    unit: Literal["C", "F"]


class Clock(BaseModel):
    """The time of a zone."""

    zone: Literal["UTC", "CET"]


def tool(model: type[BaseModel], strict: bool | None = None) -> dict[str, Any]:
    schema = {**model.model_json_schema(), "additionalProperties": False}
    function = {"name": model.__name__, "description": model.__doc__, "parameters": schema}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}
TOOLS = [tool(Weather), tool(Clock)]

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "Clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
ROME, UTC = Weather(city="Rome", unit="C"), Clock(zone="UTC")
CALLS_IN_A_TEXT = f"Let me see.\n{CALL}\n{CLOCK} That is all."


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces that begin at these positions."""
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


def cut_by_chance(text: str, seed: int) -> list[str]:
    return cut(text, random.Random(seed).sample(range(1, len(text)), 20))


class ScriptedLLM(AsyncLLM):
    """Answers with its script, or without one with the model's own answer, independently of the order of tests. Keeps
    the last prompt."""

    script: Sequence[str] | None = None
    prompt: str = ""

    async def stream(self, prompt: Any, params: Any = None, request_id: Any = None, **options: Any) -> Any:  # type: ignore[override]
        self.prompt = self.tokenizer.decode(prompt, skip_special_tokens=False) if self.tokenizer else ""
        if self.script is None:
            params = params if params.seed is not None else replace(params, seed=0)
            async for delta in super().stream(prompt, params, request_id, **options):
                yield delta
            return
        async for delta in self._say(list(prompt), self.script, params.n):
            yield delta

    async def _say(self, prompt: list[int], script: Sequence[str], n: int) -> AsyncGenerator[TextDelta, None]:
        texts = [CompletionOutput(index, "".join(script), [5], finish_reason="stop") for index in range(n)]
        output = RequestOutput("", None, prompt, texts, RequestMetrics(time.monotonic()), finished=True)
        for number, text in enumerate(script, 1):
            for index in range(n):
                is_last = number == len(script)
                whole = output if is_last and index == n - 1 else None
                yield TextDelta(0, index, text, [5], finish_reason="stop" if is_last else None, output=whole)


@contextmanager
def scripted_server(template: str | None = None, **settings: Any) -> Iterator[RunningServer]:
    """The embedded model with this template instead of its own."""
    llm = ScriptedLLM(num_blocks=2000, in_process=True)
    if template is not None:
        llm.tokenizer.inner.chat_template = template  # type: ignore[union-attr]
    with RunningServer(llm, model_name="stories", **settings) as server:
        yield server


def say(server: RunningServer, *script: str) -> None:
    """Make the model answer with these pieces from now on; without a script, with its own answer."""
    assert isinstance(server.llm, ScriptedLLM)
    server.llm.script = script or None


def prompt_of(server: RunningServer) -> str:
    """The last prompt that the model got."""
    assert isinstance(server.llm, ScriptedLLM)
    return server.llm.prompt
