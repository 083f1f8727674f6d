"""Grammars of tool calls: every text that they allow is parsed as valid calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import pytest

from inflight.contracts.api.structured_output import StructuredOutput
from inflight.demo_model import DEMO_MODEL
from inflight.grammar import GrammarCompiler
from inflight.server.chat_format.answer_form import AnswerForm, answer_form
from inflight.server.chat_format.answer_template import call_format_of
from inflight.server.chat_format.call_grammar import calls_grammar, schema_of
from inflight.server.chat_format.families import CALL_FORMATS, PLAIN, CallFormat
from inflight.server.chat_format.tools import ToolFields
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer
from tests.grammar.helpers import compiler, spelled, walk, write
from tests.server.chat_format.pieces import read_all
from tests.server.chat_format.test_json_calls import put_together, reader_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "a::=b", "</tool_call>"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, 'odd "name" ::= é': NOTHING}
HERMES, LLAMA3, MISTRAL = CALL_FORMATS.values()
FORMATS = [HERMES, LLAMA3, MISTRAL, PLAIN]


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = read_tokenizer(str(DEMO_MODEL))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return compiler(tokenizer)


def with_markers(special: bool) -> Tokenizer:
    """A tokenizer in which each marker of a call is a single token."""
    loaded = read_tokenizer(str(DEMO_MODEL))
    assert loaded is not None
    markers = [marker for each in FORMATS for marker in (each.begin, each.end) if marker]
    loaded.inner.add_tokens(markers, special_tokens=special)
    return Tokenizer(loaded.inner)


def grammar(call_format: CallFormat, **options: Any) -> StructuredOutput:
    schemas = {name: schema_of(schema) for name, schema in SCHEMAS.items()}
    return calls_grammar(call_format, schemas, {}, **{"is_required": True, "is_parallel": True, **options})


def read(call_format: CallFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = reader_of(call_format, tuple(SCHEMAS), is_guaranteed=True)
    return put_together(read_all(parser, [text]))


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_every_text_of_the_grammar_is_parsed_as_valid_calls(
    call_format: CallFormat, is_parallel: bool, tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    called: set[str] = set()
    most = 0
    for seed in range(30):
        matcher = grammars.compile(grammar(call_format, is_parallel=is_parallel))
        text = walk(matcher, tokenizer, random.Random(seed), num_wandering=10 * (seed % 10))
        content, calls = read(call_format, text)
        assert content == ""
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            called.add(name)
        most = max(most, len(calls))
    assert called == set(SCHEMAS)
    assert (most > 1) == (is_parallel and call_format is not LLAMA3)


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda each: each.name)
def test_the_text_is_content_of_a_schema_or_calls(
    call_format: CallFormat, tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    content_schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    content_schema["additionalProperties"] = False
    asked = grammar(call_format, is_required=False, content_schema=schema_of(content_schema))
    kinds = set()
    for seed in range(20):
        text = walk(grammars.compile(asked), tokenizer, random.Random(seed), num_wandering=30)
        content, calls = read(call_format, text)
        assert bool(content) != bool(calls), text
        kinds.add(bool(calls))
        if content:
            jsonschema.validate(json.loads(content), content_schema)
    assert kinds == {True, False}


CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
    "llama3": '{"name": "weather", "parameters": {"city": "Rome"}}',
}


@pytest.mark.parametrize("call_format", [HERMES, MISTRAL, LLAMA3], ids=lambda each: each.name)
def test_text_is_unconstrained_up_to_a_call(
    call_format: CallFormat, tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    asked = grammar(call_format, is_required=False)
    call = CALL[call_format.name]

    def num_written(text: str) -> tuple[bool, bool]:
        matcher = grammars.compile(asked)
        return write(matcher, tokenizer, text) == len(spelled(tokenizer, text)), matcher.may_stop

    for text in ("", "Let me see: it is < 3 {degrees}.", "\n é [TOOL", call):
        assert num_written(text) == (True, True), text
    for text in (call[:-3], call[:20]):
        assert num_written(text) == (True, False), text
    for text in (call.replace("weather", "climate"), call.replace("Rome", "Paris")):
        assert not num_written(text)[0], text
    if call_format is not LLAMA3:
        assert num_written(f"Let me see.\n{call}") == (True, True)
        assert not num_written(f"Let me see.\n{call.replace('weather', 'climate')}")[0]
    if call_format is HERMES:
        assert num_written(f"{call}\n{call}") == (True, True)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("template", ["<tool_call> {{ tools }}", "[TOOL_CALLS] {{ tools }}"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_marker_can_be_written_as_a_single_token(special: bool, template: str, choice: str) -> None:
    tokenizer = with_markers(special)
    asked = ToolFields(tools=[tool("weather", WEATHER, strict=True)], tool_choice=choice)  # type: ignore[list-item,arg-type]
    call_format = call_format_of(template)
    assert call_format is not None
    use = answer_form(asked, None, tokenizer, "", template)
    assert use is not None
    assert use.structured_output is not None
    assert use.shows_special_tokens == special
    text = CALL[call_format.name]
    token_ids = tokenizer.inner.encode(text, add_special_tokens=False)
    assert tokenizer.inner.convert_tokens_to_ids(call_format.begin) == token_ids[0]
    matcher = compiler(tokenizer).compile(use.structured_output)
    assert all(matcher.accept(token_id) for token_id in token_ids)
    assert matcher.may_stop
    shown = tokenizer.decode(token_ids, skip_special_tokens=not use.shows_special_tokens)
    parser = use.make_reader()
    assert put_together(read_all(parser, [shown])) == ("", [("weather", '{"city": "Rome"}')])


def form_of(tokenizer: Tokenizer, content: StructuredOutput | None = None, **fields: Any) -> AnswerForm | None:
    template = fields.pop("template", "<tool_call> {{ tools }}")
    return answer_form(ToolFields(**fields), content, tokenizer, "", template)


def test_which_requests_are_constrained(tokenizer: Tokenizer) -> None:
    free, strict = tool("f", WEATHER), tool("g", WEATHER, strict=True)
    unenforceable = tool("f", {"not": {}})

    def is_guaranteed(**fields: Any) -> bool:
        form = form_of(tokenizer, **fields)
        assert form is not None
        return form.structured_output is not None

    assert not is_guaranteed(tools=[free])
    assert not is_guaranteed(tools=[unenforceable])
    assert is_guaranteed(tools=[free, strict])
    assert is_guaranteed(tools=[free], tool_choice="required")
    assert is_guaranteed(tools=[tool("f", {"not": {}}, strict=False)], tool_choice="required")
    assert form_of(tokenizer, tools=[free], tool_choice="none") is None
    assert form_of(tokenizer, tools=[]) is None


def test_only_the_named_tool_is_called_and_only_once(tokenizer: Tokenizer) -> None:
    tools = [tool("f", WEATHER), tool("g", WEATHER)]
    form = form_of(tokenizer, tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert form is not None
    call = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>'
    for name, calls in (("f", []), ("g", [("g", '{"city": "Rome"}')])):
        reader = form.make_reader()
        assert put_together(read_all(reader, [2 * (call % name)]))[1] == calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [tool("f"), tool("f")]}, "tools has 'f' more than once"),
        ({"tool_choice": "required"}, "a tool must be called, but tools has no tools"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "'g' must be called, but tools has only 'f'",
        ),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                },
            },
            "'g' is allowed, but it is not in tools",
        ),
        ({"tools": [tool("f")], "template": "{{ messages }}"}, "this model's chat template does not tell the model"),
        ({"tools": [tool("f")], "template": "{{ tools }}"}, "this model's notation of calls is unknown"),
        ({"tools": [tool("f", {"not": {}}, strict=True)]}, "the tool 'f': json_schema has 'not' at #"),
        (
            {"tools": [tool("f", {"not": {}})], "tool_choice": "required"},
            "cannot be enforced; leave it out; with 'strict': false any object is accepted",
        ),
        (
            {"tools": [tool("f", {"type": "string"}, strict=True)]},
            "the tool 'f': the type of its parameters is 'string'; arguments must be an 'object'",
        ),
        (
            {"tools": [tool("f")], "content": StructuredOutput(regex="a+")},
            "regex is given, and tools may be called; besides calls there can only be text or JSON",
        ),
    ],
)
def test_invalid_tool_requests_are_refused(tokenizer: Tokenizer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        form_of(tokenizer, **fields)
    assert message in str(refused.value)
    assert refused.value.status == 400
    assert refused.value.param in ("tools", "tool_choice")
