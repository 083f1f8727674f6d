"""A model with a scripted answer (reasoning, calls, content) for each request."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inflight.contracts.api.outputs import TextDelta
from tests.server.chat_format.scripted import ScriptedLLM, cut_by_chance
from tests.server.serving import RunningServer

TEMPLATE = """{% if tools %}# Tools
{{ tools | tojson }}
Answer <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen 3 has it, in few words: the embedded model has a short context."""

REASONING = "They want the weather.\nI must look."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
ANSWER = "It will be sunny in Rome."
QUESTION = "How is the weather in Rome?"

CALLING = f"<think>\n{REASONING}\n</think>\n\n{CALL}"
CALLING_TWICE = f"{CALLING}\n{CALL.replace('Rome', 'Paris').replace('2', '1')}"
SECOND_REASONING = "Sunny, then."
ANSWERING = f"<think>\n{SECOND_REASONING}\n</think>\n\n{ANSWER}"

CALLED = CALL
CALLED_TWICE = f"{CALLED}{CALLED.replace('Rome', 'Paris').replace('2', '1')}"
RETURNED = "<|im_end|>\n<|im_start|>tool\nsunny in Rome for 2 days<|im_end|>\n"
RETURNED_TWICE = f"{RETURNED}<|im_start|>tool\nsunny in Paris for 1 days<|im_end|>\n"
REASONING_BEFORE = f"<think>\n{REASONING}\n</think>\n\n"
"""How these look in a prompt."""


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


class Weather:
    """A tool.

    Attributes:
        asked: the arguments of each call.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def get_weather(self, city: str, days: int) -> str:
        """The weather of a city."""
        self.asked.append((city, days))
        return f"sunny in {city} for {days} days"


class TurnsLLM(ScriptedLLM):
    """Answers each request with the next script.

    Attributes:
        turns: the remaining scripts.
        prompts: the prompts of all requests.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.turns: list[Sequence[str]] = []
        self.prompts: list[str] = []

    async def stream(self, prompt: Any, params: Any = None, request_id: Any = None, **options: Any) -> Any:  # type: ignore[override]
        self.script = self.turns.pop(0)
        deltas: Iterator[TextDelta] = super().stream(prompt, params, request_id, **options)
        async for delta in deltas:  # type: ignore[attr-defined]
            yield delta

    async def _say(self, prompt: list[int], script: Sequence[str], n: int) -> Any:
        self.prompts.append(self.prompt)
        async for delta in super()._say(prompt, script, n):
            yield delta


@contextmanager
def server_of_turns() -> Iterator[RunningServer]:
    """The embedded model with scripted reasoning and tool calls."""
    llm = TurnsLLM(num_blocks=200, in_process=True)
    llm.tokenizer.inner.chat_template = TEMPLATE  # type: ignore[union-attr]
    with RunningServer(llm, model_name="stories") as server:
        yield server


def plan(server: RunningServer, *texts: str) -> None:
    """Make the model answer the next requests with these texts, in pieces."""
    assert isinstance(server.llm, TurnsLLM)
    server.llm.turns = [cut_by_chance(text, seed) for seed, text in enumerate(texts)]
    server.llm.prompts = []


def prompts_of(server: RunningServer) -> list[str]:
    """The prompts since the plan was made. Fails if a script of the plan was not used."""
    assert isinstance(server.llm, TurnsLLM)
    assert not server.llm.turns
    return server.llm.prompts
