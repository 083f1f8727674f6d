"""Answer formats of model families, and their grammars of calls: one `Family` each.

A family's response template (of `transformers`: a field for each kind of text, with its markers) follows its published
chat template; a tokenizer's own response template takes precedence. A chat template's family is recognised by its
markers. Patterns are bounded, since each token searches for them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from inflight.contracts.api.structured_output import Reasoning

ResponseTemplate: TypeAlias = Mapping[str, Any]
"""See `transformers.utils.chat_parsing`."""

Field: TypeAlias = Mapping[str, Any]
"""A field of one."""

NO_ANCHOR = {"start_anchor_pattern": r"(?!)"}
"""The beginning of answers is unknown; see `AnswerTemplate.reader`."""

ITEM = "item"
"""The name of an array's values, see `MarkedArguments`."""

CHATML = "<|im_start|>assistant\n"
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAMED = {"type": "function", "function": "{content}"}
_THINK = {"open": "<think>", "close": "</think>"}


@dataclass(frozen=True, slots=True)
class MarkedArguments:
    """Arguments that are written one by one; in `begin` and `end`, "{key}" stands for an argument's name. If `end` has
    it, objects and arrays are written in the same way within a value, an array's values with the name `ITEM`.

    Attributes:
        begin_other: the same before values that are not strings; "": `begin`.
    """

    begin: str
    end: str
    begin_other: str = ""

    @property
    def is_nested(self) -> bool:
        """Whether values within values are written like arguments."""
        return "{key}" in self.end


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """Arguments as in Python: names, "=", and literals, which may also be JSON's."""


@dataclass(frozen=True, slots=True)
class BareJson:
    """Arguments in JSON without quotes around keys, without spaces, and with a mark around strings."""

    string_mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A notation for calls. They come in groups: `begin`, `opening`, the calls, `closing`, `end`. A call is a JSON
    object with a name and arguments; or `head`, its arguments, and `tail`.

    Attributes:
        name: the name that operators use.
        begin: the marker before a group.
        end: the marker after it; "" if there is none.
        opening, closing: the text between the markers and the calls.
        arguments_key: the key of a call's arguments, next to its "name", in an object.
        head: in it, "{name}" stands for the name of the tool, "{index}" for a number, and "{id}" for an id; "": a call
            is an object.
        tail: what follows the arguments.
        arguments: how they are written; None: as JSON.
        between_objects: the text between the calls of a group; None: each call has its own group or, if `begin` is
            optional, there is at most one.
        between_groups: the text between groups; None: there is at most one.
        is_begin_optional: whether an object at the beginning of the text is a call, too. Models that may omit `begin`
            are never forced to write it.
        call_id: the form of ids: a number of letters and digits, or a text with places as in `head`; None: OpenAI's.
    """

    name: str
    begin: str
    end: str = ""
    opening: str = ""
    closing: str = ""
    arguments_key: str = "arguments"
    head: str = ""
    tail: str = ""
    arguments: MarkedArguments | BareJson | KeywordArguments | None = None
    between_objects: str | None = None
    between_groups: str | None = "\n"
    is_begin_optional: bool = False
    call_id: int | str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Models with one format.

    Attributes:
        name: for messages and documents.
        marks: the family's chat templates contain at least one text of each of these.
        template: how answers are written; None: only calls have a notation.
        calls: how calls are written, for grammars.
        reasoning: the markers around reasoning before structured output; None: those of the template.
        content_begin: the mark before content.
    """

    name: str
    marks: Sequence[Sequence[str]]
    template: ResponseTemplate | None
    calls: CallFormat | None = None
    reasoning: Reasoning | None = None
    content_begin: str = ""

    def has(self, chat_template: str) -> bool:
        """Whether this chat template (Jinja) is one of the family's."""
        return all(any(mark in chat_template for mark in marks) for marks in self.marks)


def _answers(anchor: str | list[str], reasoning: Field, calls: Field, content: Field | None = None) -> ResponseTemplate:
    fields = {"reasoning_content": reasoning, "tool_calls": {**calls, "repeats": True}, "content": content or {}}
    return {"start_anchor": anchor, "fields": fields}


def calls_field(open_pattern: str, close_pattern: str, content: str = "json", **more: Any) -> Field:
    """Return a field of calls whose opening mark has the group `name`."""
    marks = {"open_pattern": open_pattern, "close_pattern": close_pattern}
    return {**marks, "content": content, "transform": _CALL, **more}


_HARMONY_END: Field = {"close": ["<|end|>", "<|return|>"], "repeats": True, "join": "\n\n"}

HARMONY = Family(
    "harmony (gpt-oss)",
    [["<|channel|>"], ["<|message|>"]],
    _answers(
        "<|start|>assistant",
        {"open_pattern": r"<\|channel\|>analysis[^<]{0,64}<\|message\|>", **_HARMONY_END},
        # The recipient stands before or after the channel, and the kind of the content may be named.
        calls_field(
            r"(?: to=functions\.(?P<name>[^<\s]{1,256})[^<]{0,64}<\|channel\|>(?:commentary|analysis)[^<]{0,64}"
            r"|<\|channel\|>(?:commentary|analysis)\s{0,8}(?:<\|constrain\|>)?[^<\s]{0,64}"
            r" to=functions\.(?P<name>[^<\s]{1,256})[^<]{0,64})"
            r"(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
            r"<\|call\|>|<\|end\|>",
        ),
        {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?:(?! to=)[^<]){0,64}"
            r"(?:<\|constrain\|>(?:(?! to=)[^<]){0,64})?<\|message\|>",
            **_HARMONY_END,
        },
    ),
    calls=CallFormat(  # the token that ends a call ends the answer, too
        name="harmony",
        begin="<|channel|>commentary to=functions.",
        head="{name} <|constrain|>json<|message|>",
        between_groups=None,
    ),
    reasoning=Reasoning(begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant"),
    content_begin="<|channel|>final<|message|>",
)

GEMMA4 = Family(
    "gemma4",
    [["<|tool_call>", "<|channel>"]],
    _answers(
        ["<|turn>model\n", "<tool_response|>"],
        {"open": "<|channel>thought\n", "close": "<channel|>"},
        calls_field(
            r"<\|tool_call>call:(?P<name>[^{<\s]{1,256})",
            r"<tool_call\|>",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        {"close": ["<turn|>", "<|tool_response>"]},
    ),
    calls=CallFormat(
        name="gemma4",
        begin="<|tool_call>",
        head="call:{name}",
        arguments=BareJson('<|"|>'),
        end="<tool_call|>",
        between_groups="",
    ),
)

LFM2 = Family(
    "lfm2",
    [["<|tool_call_start|>", "<|tool_list_start|>"]],
    _answers(
        CHATML,
        _THINK,
        {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "json",
            "content_args": {"python_calls": True},
        },
    ),
    calls=CallFormat(
        name="lfm2",
        begin="<|tool_call_start|>",
        opening="[",
        head="{name}(",
        arguments=KeywordArguments(),
        tail=")",
        between_objects=", ",
        closing="]",
        end="<|tool_call_end|>",
    ),
)

HERMES = Family(
    "hermes (Qwen 2.5 and 3)",
    [["<tool_call>"]],
    _answers(CHATML, _THINK, calls_field(r"<tool_call>", r"</tool_call>", transform=_NAMED)),
    calls=CallFormat(name="hermes", begin="<tool_call>", end="</tool_call>", opening="\n", closing="\n"),
)

MISTRAL = Family(
    "mistral (from its seventh tokenizer on)",
    [["[TOOL_CALLS]"], ["[ARGS]"]],
    _answers(
        ["[/INST]", "[/TOOL_RESULTS]"],
        {"open": "[THINK]", "close": "[/THINK]"},
        calls_field(r"\[TOOL_CALLS\](?P<name>[^\[]{1,256})(?:\[CALL_ID\][^\[]{0,64})?\[ARGS\]", r"(?=\[TOOL_CALLS\])"),
    ),
    calls=CallFormat(name="mistral-v11", begin="[TOOL_CALLS]", head="{name}[ARGS]", between_groups="", call_id=9),
)

LLAMA3 = Family(
    "llama 3.1 to 3.3",
    [["<|python_tag|>", "<|eot_id|>"], ["<|python_tag|>", '"parameters":']],
    None,
    calls=CallFormat(name="llama3", begin="<|python_tag|>", arguments_key="parameters", is_begin_optional=True),
)
"""Their templates refuse messages with more than one call, so the grammar never allows more."""

MISTRAL_V3 = Family(
    "mistral (its third tokenizer, as in Mistral 7B v0.3)",
    [["[TOOL_CALLS]"]],
    None,
    calls=CallFormat(name="mistral", begin="[TOOL_CALLS]", opening="[", closing="]", between_objects=", ", call_id=9),
)
"""Its template refuses ids of any other length."""

THINKING = Family(
    "others that think between <think> and </think>",
    [["<think>", "</think>"]],
    {**NO_ANCHOR, "fields": {"reasoning_content": _THINK, "content": {}}},
)

FAMILIES = (HARMONY, GEMMA4, LFM2, MISTRAL)
"""Families that vary from their chat templates. The first match counts."""

FALLBACKS = (HERMES, LLAMA3, MISTRAL_V3, THINKING)
"""For chat templates from which nothing can be learned. The first match counts."""

PLAIN = CallFormat(name="plain", begin="", between_objects="\n", is_begin_optional=True)
"""For models without a known notation: bare objects, enforced by a grammar."""

CALL_FORMATS = {each.calls.name: each.calls for each in (HERMES, LLAMA3, MISTRAL_V3) if each.calls}
"""Notations for operators' --tool-call-parser: calls as objects."""


def head_of(call_format: CallFormat, name: str) -> str:
    """Return the beginning of a call that a grammar guarantees, up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{call_format.arguments_key}": '
