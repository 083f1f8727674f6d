"""Grammars of calls in the families' own notations: what an independent writer writes is accepted, and read as it was
meant; what breaks a schema is not accepted."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.demo_model import DEMO_MODEL
from inflight.server.chat_format.answer_form import AnswerForm, answer_form
from inflight.server.chat_format.answer_template import call_format_of
from inflight.server.chat_format.call_grammar import target
from inflight.server.chat_format.tools import ToolFields
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer
from tests.grammar.helpers import compiler
from tests.server.chat_format.pieces import CallDelta, Reasoning, fed, read_all
from tests.server.chat_format.scripted import cut
from tests.server.chat_format.templates import TEMPLATES, written
from tests.server.chat_format.test_template_reader import parts_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "my-key": {"type": "boolean"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "height": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
ANY = {"type": "function", "function": {"name": "anything", "parameters": {"type": "object"}, "strict": False}}


def in_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """A value as Gemma 4's chat template writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else in_json(value)


def keywords(call: tuple[str, Mapping[str, Any]]) -> str:
    """A call as in Python, with JSON's literals."""
    return f"{call[0]}({', '.join(f'{key}={in_json(value)}' for key, value in call[1].items())})"


@dataclass(frozen=True)
class Notation:
    """A family's chat template, as far as it tells the family, and how calls are written."""

    template: str
    marks: tuple[str, ...]
    write_all: Callable[..., str]
    before_text: str = ""
    between: str | None = "\n"

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.write_all((name, arguments))


def _harmony(call: tuple[str, Mapping[str, Any]]) -> str:
    name, arguments = call
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{in_json(arguments)}"


def notation_of(name: str) -> Notation:
    """One that is learned: the template is the writer."""
    call = written(name, ("weather", {"city": "Rome", "days": 1}))
    marks = [
        each
        for each in re.findall(r"\]<\]minimax\[>\[|</?[^<>]*>|\[/?[A-Z_]+\]", call)
        if not re.search("weather|city|days", each)
    ]
    learned = call_format_of(TEMPLATES[name])
    assert learned is not None
    said = "<|START_RESPONSE|>" if name == "command-a" else ""
    return Notation(
        TEMPLATES[name],
        tuple(dict.fromkeys(marks)),
        lambda *calls: written(name, *calls).lstrip(),
        before_text=said,
        between=learned.between_groups,
    )


NOTATIONS = {
    "harmony": Notation(
        "<|channel|> <|message|> {{ tools }}",
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
        _harmony,
        before_text="<|channel|>final<|message|>",
        between=None,
    ),
    "gemma4": Notation(
        "<|tool_call> {{ tools }}",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        lambda *calls: "".join(f"<|tool_call>call:{name}{bare(arguments)}<tool_call|>" for name, arguments in calls),
        between="",
    ),
    "lfm2": Notation(
        "<|tool_call_start|> {{ tools }}",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        lambda *calls: f"<|tool_call_start|>[{', '.join(map(keywords, calls))}]<|tool_call_end|>",
        between=None,
    ),
    "mistral": Notation(
        "[TOOL_CALLS] [ARGS] {{ tools }}",
        ("[TOOL_CALLS]", "[ARGS]"),
        lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{in_json(arguments)}" for name, arguments in calls),
        between="",
    ),
    **{name: notation_of(name) for name in TEMPLATES if name != "mistral-nemo"},  # its objects have ids
}

RIGHT = [
    {"city": "Rome", "unit": "C"},
    {"city": 'a "quoted" <b>\n{x}, é', "unit": "F", "days": 3, "exact": True, "my-key": False},
    {"city": "", "unit": "C", "places": [{"name": "Monte, {x}", "height": 1.5}, {"name": "Sea", "height": None}]},
]
WRONG = [
    {"city": "Rome"},
    {"city": "Rome", "unit": "K"},
    {"city": "Rome", "unit": "C", "days": 10},
    {"city": "Rome", "unit": "C", "exact": "maybe"},
    {"city": "Rome", "unit": "C", "colour": "red"},
    {"city": "x" * 41, "unit": "C"},
]


def tokenizer_of(notation: Notation, kind: str) -> Tokenizer:
    loaded = read_tokenizer(str(DEMO_MODEL))
    assert loaded is not None
    if kind != "as text":
        loaded.inner.add_tokens(list(notation.marks), special_tokens=kind == "special tokens")
    return Tokenizer(loaded.inner)


def form_of(notation: Notation, tokenizer: Tokenizer, tools: list[Any], choice: str) -> AnswerForm:
    form = answer_form(ToolFields(tools=tools, tool_choice=choice), None, tokenizer, "", notation.template)  # type: ignore[arg-type]
    assert form is not None
    assert form.structured_output is not None
    return form


READERS = {name: form_of(each, tokenizer_of(each, "as text"), [TOOL, ANY], "auto") for name, each in NOTATIONS.items()}


def ends(form: AnswerForm, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a grammar lets a model write this text and then end."""
    assert form.structured_output is not None
    matcher = compiler(tokenizer).compile(form.structured_output)
    return all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False))) and matcher.may_stop


@pytest.mark.parametrize("kind", ["as text", "tokens", "special tokens"])
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.thorough("required")
def test_calls_that_follow_their_schema_can_be_written_and_are_read(name: str, choice: str, kind: str) -> None:
    notation = NOTATIONS[name]
    tokenizer = tokenizer_of(notation, kind)
    form = form_of(notation, tokenizer, [TOOL, ANY], choice)
    assert form.shows_special_tokens == (kind == "special tokens") or name == "harmony"  # some marks are always special
    anything = ("anything", {"a": "x", "b_c": "y"})
    for calls in ([("weather", arguments)] for arguments in RIGHT):
        calls = [*calls, anything] if notation.between is not None else calls
        text = (notation.between or "").join(notation.write(*call) for call in calls)
        assert ends(form, tokenizer, text), text
        reader = form.make_reader()
        assert parts_of(read_all(reader, [text])) == tuple(calls)
    for arguments in WRONG:
        assert not ends(form, tokenizer, notation.write("weather", arguments)), arguments
    assert not ends(form, tokenizer, notation.write("climate", RIGHT[0]))
    said = f"{notation.before_text}It is < 3 degrees, {{so}} [to] say."
    assert ends(form, tokenizer, said) == (choice == "auto")


TEXTS = st.text(st.sampled_from('ab <>/|"{}[]:,\n\\é😀'), max_size=20)


@settings(max_examples=30)
@given(TEXTS, st.lists(st.fixed_dictionaries({"name": TEXTS}, optional={"height": st.floats(-9, 9)}), max_size=2))
@pytest.mark.parametrize("name", NOTATIONS)
def test_any_arguments_come_back_as_they_were(name: str, city: str, places: list[Any]) -> None:
    notation = NOTATIONS[name]
    arguments = {"city": city, "unit": "C", "places": places}
    form = form_of(notation, tokenizer_of(notation, "as text"), [TOOL], "required")
    reader = form.make_reader()
    text = notation.write("weather", arguments)
    assert parts_of(read_all(reader, [text])) == (("weather", arguments),)


IN_JSON = [name for name, each in NOTATIONS.items() if '{"a": "b"}' in each.write("f", {"a": "b"})]


@pytest.mark.parametrize("name", IN_JSON)
def test_guaranteed_arguments_in_json_are_streamed(name: str) -> None:
    text = NOTATIONS[name].write("weather", {"city": "Rome"})
    begin = text.index('{"city": "Rome"}') + 1
    reader = READERS[name].make_reader()
    assert "".join(call.arguments for call in fed(reader, text[:begin]) if isinstance(call, CallDelta)) == "{"
    for letter in '"city": "Rome"}':
        assert fed(reader, letter) == [CallDelta(0, letter)]


def fragments(notation: Notation) -> list[str]:
    """The marks of a notation and what stands between them, as its writer writes it, and what else may mislead."""
    call = notation.write("weather", {"city": "a", "unit": "b"})
    marks = re.findall(r'<\|?"?\|?>|<[^<>]*>|\[[A-Z_]*\]|[^<\[]+', call)
    whole = [call, *call.split("a", 1), "".join(marks[-3:]), notation.write("weather", {"city": ""})]
    return [
        *marks,
        *whole,
        *notation.marks,
        "<think>",
        "</think>",
        "<parameter=x>",
        '"',
        "\\",
        "{",
        "}",
        "\n",
        " ",
        "é",
    ]


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("name", NOTATIONS)
def test_marks_within_a_value_never_shorten_a_call(name: str, data: st.DataObject) -> None:
    notation = NOTATIONS[name]
    value = "".join(data.draw(st.lists(st.sampled_from(fragments(notation)), max_size=6)))
    arguments = data.draw(st.permutations([("city", value), ("unit", "C")]))
    text = notation.write("weather", dict(arguments))
    form = READERS[name]
    reader = form.make_reader()
    parts = parts_of(read_all(reader, [text]))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    for pieces in (list(text), cut(text, places)):
        reader = form.make_reader()
        assert parts_of(read_all(reader, pieces)) == parts
    if parts != (("weather", dict(arguments)),):
        # No notation without quotes is free of doubt: then nothing is called, or the text is what was understood.
        call_format = call_format_of(notation.template)
        assert call_format is not None
        assert call_format.arguments is not None
        texts = [part.text if isinstance(part, Reasoning) else part for part in parts]
        kinds = groupby(texts, key=lambda part: isinstance(part, str))
        understood = ["".join(found) if is_text else notation.write_all(*found) for is_text, found in kinds]
        around = (call_format.begin, call_format.end.strip()) if call_format.between_objects is not None else ()
        left_out = "|".join([r"\s", "</?think>", *map(re.escape, around)])
        assert parts == (text,) or re.sub(left_out, "", "".join(understood)) == re.sub(left_out, "", text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qwen3-coder", {"type": "string", "pattern": "a+"}, "'pattern' of 'x' cannot be enforced in this model's"),
        ("gemma4", {"type": "string", "pattern": "a+"}, "'pattern' cannot be enforced in this model's"),
        ("gemma4", {"type": "array", "minItems": 2}, "'minItems' cannot be enforced in this model's"),
        ("gemma4", {"enum": [1], "maximum": 3}, "'enum' beside other keywords cannot be enforced"),
        ("qwen3-coder", {"enum": []}, "the enum of 'x' has no values"),
    ],
)
def test_what_a_notation_cannot_enforce_is_refused_by_name(name: str, value: Any, message: str) -> None:
    schema = {"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ApiError, match=message):
        form_of(NOTATIONS[name], tokenizer_of(NOTATIONS[name], "as text"), [tool], "auto")


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"required": ["a"]}]},
        {"required": ["a"], "additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": False}, "additionalProperties": False},
    ],
)
def test_what_a_notation_cannot_say_about_all_arguments_is_refused(name: str, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ApiError) as refused:
        form_of(NOTATIONS[name], tokenizer_of(NOTATIONS[name], "as text"), [tool], "auto")
    assert refused.value.status == 400


def test_a_reference_to_an_anchor_is_not_one_to_the_root() -> None:
    schema = {"$defs": {"a/b": {"type": "null"}}}
    assert (target("#", schema), target("#/$defs/a~1b", schema)) == (schema, {"type": "null"})
    for reference in ("#node", "#/$defs/c", "x"):
        with pytest.raises(ValueError, match=f"the reference '{re.escape(reference)}' leads nowhere"):
            target(reference, schema)


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4"])
def test_arguments_may_be_anything_where_the_schema_says_so(name: str) -> None:
    schema = {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": True}, "additionalProperties": False}}}
    schema["$defs"]["all"]["type"] = "object"  # type: ignore[index]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    notation = NOTATIONS[name]
    tokenizer = tokenizer_of(notation, "as text")
    form = form_of(notation, tokenizer, [tool], "auto")
    assert ends(form, tokenizer, notation.write("f", {"a": [1, True]}))
