"""How families of models write their answers, for tokenizers that do not say so themselves.

Each is a response template of `transformers` (a field for each kind of text, with the marks around it), written after
the chat template that the family publishes. What a family's chat template must contain decides which family it is.
Marks have bounds, because they are searched for anew with each token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from inflight.contracts.structured_output import Thoughts
from inflight.server.chat_format import call_format
from inflight.server.chat_format.call_format import CallFormat

ResponseTemplate: TypeAlias = Mapping[str, Any]
"""See `transformers.utils.chat_parsing`."""

NO_ANCHOR = {"start_anchor_pattern": r"(?!)"}
"""Where the answer begins is not known; see `AnswerTemplate.reader`."""

CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAMED = {"type": "function", "function": "{content}"}
_THOUGHTS = {"open": "<think>", "close": "</think>"}
_CONTENT: dict[str, Any] = {"content": {}}


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write alike.

    Attributes:
        name: for messages and documents.
        marks: each of these has one text that the chat templates of the family contain.
        foreign_marks: none of these is in them.
        template: how answers are written.
        call_format: how calls are written, for grammars.
        thoughts: the marks around a thought that something else must follow; None: those of the template.
        content_begin: the mark before content.
    """

    name: str
    marks: Sequence[Sequence[str]]
    template: ResponseTemplate
    foreign_marks: Sequence[str] = ()
    call_format: CallFormat | None = None
    thoughts: Thoughts | None = None
    content_begin: str = ""

    def has(self, chat_template: str) -> bool:
        """Whether this chat template (Jinja) is one of the family's."""
        return all(any(mark in chat_template for mark in marks) for marks in self.marks) and not any(
            mark in chat_template for mark in self.foreign_marks
        )


def _calls(open_pattern: str, close_pattern: str, content: str, transform: Any, **more: Any) -> dict[str, Any]:
    marks = {"open_pattern": open_pattern, "close_pattern": close_pattern}
    return {**marks, "repeats": True, "content": content, "transform": transform, **more}


HARMONY = Family(
    "harmony (gpt-oss)",
    [["<|channel|>"], ["<|message|>"]],
    {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"<\|channel\|>analysis[^<]{0,64}<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n\n",
            },
            # The recipient stands before or after the channel, and the kind of the content may be named.
            "tool_calls": _calls(
                r"(?: to=functions\.(?P<name>[^<\s]{1,256})[^<]{0,64}<\|channel\|>(?:commentary|analysis)[^<]{0,64}"
                r"|<\|channel\|>(?:commentary|analysis)\s{0,8}(?:<\|constrain\|>)?[^<\s]{0,64}"
                r" to=functions\.(?P<name>[^<\s]{1,256})[^<]{0,64})"
                r"(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
                r"<\|call\|>|<\|end\|>",
                "json",
                _CALL,
            ),
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)(?:(?! to=)[^<]){0,64}"
                r"(?:<\|constrain\|>(?:(?! to=)[^<]){0,64})?<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n\n",
            },
        },
    },
    call_format=call_format.HARMONY,
    thoughts=Thoughts(begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant"),
    content_begin="<|channel|>final<|message|>",
)

GEMMA4 = Family(
    "gemma4",
    [["<|tool_call>", "<|channel>"]],
    {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": _calls(
                r"<\|tool_call>call:(?P<name>[^{<\s]{1,256})",
                r"<tool_call\|>",
                "json",
                _CALL,
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    },
    call_format=call_format.GEMMA4,
)

DEEPSEEK = Family(
    "deepseek-v3.1",
    [["<｜Assistant｜>"]],
    {
        "start_anchor": "<｜Assistant｜>",
        "fields": {
            "reasoning_content": _THOUGHTS,
            # R1 and V3: a kind, the name, and a block of JSON; V3.1: the name and JSON.
            "tool_calls": _calls(
                r"(?:<｜tool▁calls▁begin｜>\s{0,8})?<｜tool▁call▁begin｜>"
                r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]{1,256})\n```(?:json)?\n|"
                r"(?!function<｜tool▁sep｜>)(?P<name>[^\n<]{1,256})<｜tool▁sep｜>)",
                r"(?:\n```)?\s{0,8}<｜tool▁call▁end｜>",
                "json",
                _CALL,
            ),
            "content": {"close": "<｜tool▁calls▁end｜>"},
        },
    },
    call_format=call_format.DEEPSEEK,
)

DEEPSEEK_R1 = replace(
    DEEPSEEK, name="deepseek-r1", marks=[*DEEPSEEK.marks, ["```json"]], call_format=call_format.DEEPSEEK_R1
)

QWEN_XML = Family(
    "qwen3-coder and qwen3.5",
    [["<tool_call>"], ["<function="]],
    {
        **CHATML,
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": _calls(
                r"<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,256})>",
                r"</function>\s{0,8}</tool_call>",
                "xml-inline",
                _CALL,
                content_args={
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>"
                    r"\n?(?P<value>.*?)\n?</parameter>"
                },
            ),
            **_CONTENT,
        },
    },
    call_format=call_format.QWEN_XML,
)

GLM = Family(
    "glm-4.5",
    [["<tool_call>"], ["<arg_key>"]],
    {
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": _calls(
                r"<tool_call>\s{0,8}(?P<name>[^<\s]{1,256})\s{0,8}(?=<arg_key>|</tool_call>)",
                r"</tool_call>",
                "xml-inline",
                _CALL,
                content_args={
                    "tag_pattern": r"<arg_key>(?P<key>[^<]{1,256})</arg_key>\s{0,8}"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
            ),
            **_CONTENT,
        },
    },
    call_format=call_format.GLM,
)

HERMES = Family(
    "hermes (Qwen 2.5 and 3)",
    [["<tool_call>"]],
    {
        **CHATML,
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": _calls(r"<tool_call>", r"</tool_call>", "json", _NAMED),
            **_CONTENT,
        },
    },
    call_format=call_format.HERMES,
)

MISTRAL = Family(
    "mistral (from its seventh tokenizer on)",
    [["[TOOL_CALLS]"], ["[ARGS]"]],
    {
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": _calls(
                r"\[TOOL_CALLS\](?P<name>[^\[]{1,256})(?:\[CALL_ID\][^\[]{0,64})?\[ARGS\]",
                r"(?=\[TOOL_CALLS\])",
                "json",
                _CALL,
            ),
            **_CONTENT,
        },
    },
    call_format=call_format.MISTRAL_ARGS,
)

THINKING = Family(
    "others that think between <think> and </think>",
    [["<think>", "</think>"]],
    {**NO_ANCHOR, "fields": {"reasoning_content": _THOUGHTS, **_CONTENT}},
)

FAMILIES = (HARMONY, GEMMA4, DEEPSEEK_R1, DEEPSEEK, QWEN_XML, GLM, HERMES, MISTRAL, THINKING)
"""The first that has a chat template counts."""


def family_of(chat_template: str) -> Family | None:
    """Return the family that a chat template belongs to; None if it is unknown."""
    return next((family for family in FAMILIES if family.has(chat_template)), None)
