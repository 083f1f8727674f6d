"""Objects of JSON as calls: what is a call and what content, independently of how the text was split."""

import json
import string
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.server.chat_format import families
from inflight.server.chat_format.answer_template import PLAIN_TEXT, AnswerTemplate, call_format_of, new_call_id
from inflight.server.chat_format.families import CALL_FORMATS, PLAIN, THINKING, CallFormat, head_of
from inflight.server.chat_format.template_reader import TemplateReader
from tests.server.chat_format.pieces import CallDelta, Piece, Reasoning, fed, read_all
from tests.server.chat_format.scripted import cut

HERMES, LLAMA3, MISTRAL = CALL_FORMATS.values()
NAMES = ("weather", "send_mail")


def tools_of(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


TOOLS = tools_of(NAMES)

Calls = list[tuple[str, str]]


def reader_of(call_format: CallFormat, names: Sequence[str] = NAMES, **options: Any) -> TemplateReader:
    return PLAIN_TEXT.with_calls(call_format).reader("", tools_of(names), names, **options)


def put_together(pieces: Iterable[Piece]) -> tuple[str, Calls]:
    """Content and calls as the client finally has them."""
    content, calls, ids = "", [], []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            content += piece
            continue
        if piece.index == len(calls):  # a new call
            assert piece.name is not None
            assert piece.call_id is not None
            assert piece.arguments == ""
            calls.append((piece.name, ""))
            ids.append(piece.call_id)
            continue
        assert piece.index == len(calls) - 1
        assert (piece.name, piece.call_id) == (None, None)
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + piece.arguments)
    assert len(set(ids)) == len(ids)
    return content, calls


def read(call_format: CallFormat, deltas: Sequence[str], **options: Any) -> tuple[str, Calls]:
    parser = reader_of(call_format, **options)
    content, calls = put_together(read_all(parser, deltas))
    if options.get("is_parallel", True):
        assert parser.num_calls == len(calls)
    return content, calls


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'
ROME = ("weather", '{"city": "Rome"}')
TRICKY = r'{"a": "}</tool_call>{\"<tool_call>\\", "b": [{"c": {}}, "[TOOL_CALLS]"], "d": "]; "}'

CASES: dict[str, tuple[CallFormat, str, str, Calls]] = {
    "text": (HERMES, " It is warm in Rome. \n", " It is warm in Rome. \n", []),
    "nothing": (HERMES, "", "", []),
    "blank": (LLAMA3, " \n", " \n", []),
    "one": (HERMES, HERMES_CALL, "", [ROME]),
    "on one line": (HERMES, HERMES_CALL.replace("\n", ""), "", [ROME]),
    "white space around": (HERMES, f"\n\n{HERMES_CALL}\n", "", [ROME]),
    "text before": (HERMES, f"Let me see.\n\n{HERMES_CALL}", "Let me see.", [ROME]),
    "text between": (HERMES, f"a {HERMES_CALL} b {HERMES_CALL}", "a b", [ROME, ROME]),
    "text behind": (HERMES, f"{HERMES_CALL}\nDone.", "\nDone.", [ROME]),
    "several": (HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", "", [ROME, ROME]),
    "two in a pair of markers": (
        HERMES,
        '<tool_call>{"name":"weather","arguments":{}}\n{"name":"send_mail","arguments":{"to":1}}</tool_call>',
        "",
        [("weather", "{}"), ("send_mail", '{"to":1}')],
    ),
    "the other order, and more keys": (
        HERMES,
        '<tool_call>{"arguments": {"city": "Rome"}, "id": [1, {"x": "}"}], "name": "weather"}</tool_call>',
        "",
        [ROME],
    ),
    "braces and markers in strings": (
        HERMES,
        f'<tool_call>{{"name": "send_mail", "arguments": {TRICKY}}}</tool_call>',
        "",
        [("send_mail", TRICKY)],
    ),
    "no closing marker": (HERMES, HERMES_CALL.removesuffix("\n</tool_call>"), "", [ROME]),
    "half a closing marker": (HERMES, HERMES_CALL.removesuffix("call>"), "", [ROME]),
    "numbers as they were written": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"x": 1.50e1, "y":  "\\u00e9"}}</tool_call>',
        "",
        [("weather", '{"x": 1.50e1, "y":  "\\u00e9"}')],
    ),
    "half a marker": (HERMES, "a <tool_cal", "a <tool_cal", []),
    "a marker alone": (HERMES, "a <tool_call>", "a <tool_call>", []),
    "a marker before no object": (HERMES, f"a <tool_call> b {HERMES_CALL}", "a <tool_call> b", [ROME]),
    "markers behind each other": (HERMES, f"<tool_call><tool_call><{HERMES_CALL}", "<tool_call><tool_call><", [ROME]),
    "bad JSON": (HERMES, '<tool_call>{"name": weather}</tool_call>', '<tool_call>{"name": weather}</tool_call>', []),
    "an unknown name": (
        HERMES,
        HERMES_CALL.replace("weather", "climate"),
        HERMES_CALL.replace("weather", "climate"),
        [],
    ),
    "arguments that are no object": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        [],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "weather"}</tool_call>', "", [("weather", "{}")]),
    "Llama, no arguments": (LLAMA3, '{"name": "weather"}', '{"name": "weather"}', []),
    "cut off": (HERMES, f"a\n{HERMES_CALL[:50]}", f"a\n{HERMES_CALL[:50]}", []),
    "a bad one between good ones": (
        HERMES,
        f'{HERMES_CALL}<tool_call>{{"name": 1}}</tool_call>{HERMES_CALL}',
        '<tool_call>{"name": 1}</tool_call>',
        [ROME, ROME],
    ),
    "Llama": (LLAMA3, '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    "Llama, behind white space": (LLAMA3, ' \n{"name": "weather", "parameters": {"city": "Rome"}} ', "", [ROME]),
    "Llama, marked": (LLAMA3, '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    "Llama, marked behind text": (
        LLAMA3,
        'a <|python_tag|>\n{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}',
        "a",
        [ROME],
    ),
    "Llama, several": (
        LLAMA3,
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "send_mail", "arguments": {}}\n'
        f'{{"name": "send_mail", "parameters": {TRICKY}}}',
        "",
        [ROME, ("send_mail", "{}"), ("send_mail", TRICKY)],
    ),
    "Llama, an object that is no call": (LLAMA3, '{"name": "Rome"} is a city', '{"name": "Rome"} is a city', []),
    "Llama, an object within text": (
        LLAMA3,
        'a {"name": "weather", "parameters": {}}',
        'a {"name": "weather", "parameters": {}}',
        [],
    ),
    "Llama, Python": (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "Mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "send_mail", "arguments": {}}]',
        "",
        [ROME, ("send_mail", "{}")],
    ),
    "Mistral, text behind": (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {TRICKY}}}] and {{',
        " and {",
        [("weather", TRICKY)],
    ),
    "Llama, text behind": (LLAMA3, f"{LLAMA_CALL}] and", "] and", [ROME]),
    "Mistral, no list": (MISTRAL, "a[TOOL_CALLS] [1, 2]", "a[TOOL_CALLS] [1, 2]", []),
    "plain": (PLAIN, '{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_separated_from_content(name: str) -> None:
    call_format, text, content, calls = CASES[name]
    assert read(call_format, [text]) == (content, calls)
    assert read(call_format, list(text)) == (content, calls)
    for place in range(len(text)):
        assert read(call_format, cut(text, [place])) == (content, calls), place


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "<tool",
        "<",
        "[",
        "]",
        "{",
        "}",
        ";",
        ",",
        "\n",
        " ",
    ),
    *('"', "\\", '{"name": "weather", "arguments": {', '{"name": "weather", "parameters": {}}', HERMES_CALL, "a", "é"),
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.integers(0, 300), max_size=20),
    st.sampled_from([HERMES, LLAMA3, MISTRAL, PLAIN]),
    st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_was_split(
    text: str, places: list[int], call_format: CallFormat, is_guaranteed: bool
) -> None:
    whole = read(call_format, [text], is_guaranteed=is_guaranteed)
    assert read(call_format, list(text), is_guaranteed=is_guaranteed) == whole
    assert (
        read(call_format, cut(text, [min(place, len(text)) for place in places]), is_guaranteed=is_guaranteed) == whole
    )
    if not whole[1]:
        assert whole[0] == text  # no text is lost


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(FRAGMENTS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(string.printable, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([HERMES, LLAMA3, MISTRAL]),
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=30),
)
def test_any_arguments_are_parsed_unchanged(
    calls: list[tuple[str, dict[str, Any]]], call_format: CallFormat, is_guaranteed: bool, places: list[int]
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    objects = [head_of(call_format, name) + arguments + "}" for name, arguments in written]
    if call_format is HERMES:
        text = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    elif call_format is MISTRAL:
        text = f"[TOOL_CALLS][{', '.join(objects)}]"
    else:
        text = "; ".join(objects)
    places = [min(place, len(text)) for place in places]
    assert read(call_format, cut(text, places), is_guaranteed=is_guaranteed) == ("", written)


def test_guaranteed_calls_are_streamed_as_they_arrive() -> None:
    parser = reader_of(HERMES, is_guaranteed=True)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    *before, (name, arguments) = [(fed(parser, character), character) for character in text[:-1]][-1:], ([], "")
    assert before
    assert (name, arguments) == ([], "")
    assert fed(parser, "o") == [CallDelta(0, "o")]
    assert fed(parser, 'me"}}\n</tool') == [CallDelta(0, 'me"}')]
    assert fed(parser, "_call>") == []
    assert fed(parser, "", is_last=True) == []


def test_calls_in_free_text_are_reported_once_they_are_complete() -> None:
    parser = reader_of(HERMES)
    assert fed(parser, "Let me see. ") == ["Let me see."]
    assert fed(parser, HERMES_CALL[:-15]) == []
    first, second = fed(parser, HERMES_CALL[-15:])
    assert isinstance(first, CallDelta)
    assert (first.name, second) == ("weather", CallDelta(0, '{"city": "Rome"}'))


def test_text_cut_off_inside_arguments_is_a_call_if_it_was_guaranteed() -> None:
    assert read(HERMES, [HERMES_CALL[:50]], is_guaranteed=True) == ("", [("weather", '{"cit')])


@pytest.mark.parametrize(
    ("call_format", "text", "reasoning", "content", "calls"),
    [
        (HERMES, f"<think>plan{HERMES_CALL}", "plan", "", [ROME]),
        (HERMES, f"<think>plan <tool_call>? {HERMES_CALL}\n{HERMES_CALL}", "plan <tool_call>?", "", [ROME, ROME]),
        (HERMES, f"<think>{HERMES_CALL}</think>a {HERMES_CALL}", HERMES_CALL, "a", [ROME]),
        (MISTRAL, f"<think>plan [TOOL_CALLS][{LLAMA_CALL}]", "plan", "", [ROME]),
        (LLAMA3, f"<think>\n{LLAMA_CALL}\n</think>\n\n{LLAMA_CALL}", LLAMA_CALL, "", [ROME]),
        (LLAMA3, f"\n<think>plan</think>a {LLAMA_CALL}", "plan", f"a {LLAMA_CALL}", []),
        (LLAMA3, f"<think>{LLAMA_CALL}", LLAMA_CALL, "", []),
        (LLAMA3, f"<think>plan<|python_tag|>{LLAMA_CALL}", "plan", "", [ROME]),
    ],
)
def test_calls_behind_and_within_reasoning(
    call_format: CallFormat, text: str, reasoning: str, content: str, calls: Calls
) -> None:
    template = AnswerTemplate(THINKING.template, THINKING).with_calls(call_format)
    for deltas in ([text], list(text)):
        reader = template.reader("", TOOLS, NAMES)
        pieces = read_all(reader, deltas)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == reasoning
        assert put_together(piece for piece in pieces if not isinstance(piece, Reasoning)) == (content, calls)


def test_only_the_first_call_is_reported_without_parallel_calls() -> None:
    text = f"{HERMES_CALL} and {HERMES_CALL}"
    assert read(HERMES, [text], is_parallel=False) == (" and", [ROME])


def test_call_ids_fit_the_template_of_the_family() -> None:
    assert new_call_id(HERMES.call_id, "f", 0).startswith("call_")
    assert len(new_call_id(MISTRAL.call_id, "f", 0)) == 9
    assert new_call_id(MISTRAL.call_id, "f", 0).isalnum()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', HERMES),
        ('{"name": function name, "parameters": dictionary} {{ "<|eot_id|>" }}', LLAMA3),
        ('{{ "<|python_tag|>" }}', LLAMA3),
        ('{{ "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}', families.MISTRAL.calls),
    ],
)
def test_the_family_is_recognised_from_the_template(template: str, expected: CallFormat | None) -> None:
    assert call_format_of(template) is expected
