"""Families are learned from chat templates alone; what cannot be read back is not believed."""

import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from inflight.server.chat_format.answer_template import AnswerTemplate, answer_template_of, families_of, shown_notation
from inflight.server.chat_format.families import THINKING, BareJson, CallFormat, MarkedArguments
from inflight.server.chat_format.learned import LEARNED
from tests.grammar.helpers import compiler, walk
from tests.server.chat_format.fuzz_calls import Fuzzer
from tests.server.chat_format.pieces import CallDelta, Reasoning, read_all
from tests.server.chat_format.templates import M3, TEMPLATES, chat, each, written
from tests.server.chat_format.test_notations import NOTATIONS, form_of, tokenizer_of
from tests.server.chat_format.test_template_reader import NAMES, TOOLS, parts_of
from tests.text.tokenizers_for_tests import byte_level

CALLS = [("get_weather", {"city": "Paris", "days": 2}), ("get-time.v2", {"exact": True})]


def learned(template: str) -> AnswerTemplate:
    known = answer_template_of(byte_level(), template)
    assert known is not None
    assert families_of(template)[0].name == LEARNED
    return known


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read(name: str) -> None:
    known, thinks = learned(TEMPLATES[name]), "quixotic" in written(name, content="", reasoning_content="quixotic")
    said = {"content": "Sure."} | ({"reasoning_content": "Hm,\nhm."} if thinks else {})
    text = written(name, *CALLS, **said)
    expected = (*([Reasoning("Hm,\nhm.")] if thinks else []), "Sure.", *CALLS)
    for pieces in ([text], list(text)):
        assert parts_of(read_all(known.reader("", TOOLS, NAMES), pieces)) == expected


def test_the_notation_is_learned() -> None:
    formats = {name: learned(template).call_format for name, template in TEMPLATES.items()}
    assert formats["qwen3-coder"] == CallFormat(
        name=LEARNED,
        begin="<tool_call>",
        head="\n<function={name}>\n",
        arguments=MarkedArguments("<parameter={key}>\n", "\n</parameter>\n"),
        tail="</function>\n</tool_call>",
    )
    assert formats["kimi-k2"] == CallFormat(
        name=LEARNED,
        begin="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        between_objects="",
        between_groups=None,
        end="<|tool_calls_section_end|>",
    )
    assert formats["nemotron"] == CallFormat(
        name=LEARNED,
        begin="<TOOLCALL>",
        opening="[",
        between_objects=", ",
        between_groups=None,
        closing="]",
        end="</TOOLCALL>",
    )
    dsml, bare = formats["deepseek-v3.2"], formats["functiongemma"]
    assert dsml is not None
    assert isinstance(dsml.arguments, MarkedArguments)
    assert dsml.arguments.begin_other == '<｜DSML｜parameter name="{key}" string="false">'
    assert bare is not None
    assert bare.arguments == BareJson("<escape>")


def test_ids_are_written_as_the_template_needs_them() -> None:
    def ids(name: str, prompt: str = "") -> list[str | None]:
        reader = learned(TEMPLATES[name]).reader(prompt, TOOLS, NAMES)
        pieces = read_all(reader, [written(name, *CALLS)])
        return [piece.call_id for piece in pieces if isinstance(piece, CallDelta) and piece.name is not None]

    assert ids("kimi-k2, by id") == ["functions.get_weather:0", "functions.get-time.v2:1"]
    before = f"{written('kimi-k2, by id', *CALLS)}<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert ids("kimi-k2, by id", before) == ["functions.get_weather:2", "functions.get-time.v2:3"]
    assert all(each is not None and len(each) == 9 and each.isalnum() for each in ids("mistral-nemo"))
    assert all(each is not None and each.startswith("call_") for each in ids("kimi-k2"))


ODD = {
    "no answers": "{{ messages }}",
    "no Jinja": "{% for %}",
    "an error": "{{ raise_exception('no') }}",
    "no calls": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "no marks": chat("{{ f.name }}: {{ f.arguments | tojson }}", thoughts=None),
    "no names": chat("<call>{{ f.arguments | tojson }}</call>", thoughts=None),
    "arguments in brackets": chat("<call>{{ f.name }}" + each("[KEY=", "]") + "!", thoughts=None),
    "arguments within arguments": chat(
        "|<tool_call>|<{{ f.name }}>{% for k, v in f.arguments.items() %}|<{{ k }}>{{ v }}|</{{ k }}>{% endfor %}"
        "|</{{ f.name }}>|</tool_call>",
        thoughts=None,
    ),
    "the same mark at both ends": chat("<call>{{ f.name }}<call>{{ f.arguments }}<call>", thoughts=None),
}


@pytest.mark.parametrize("name", ODD)
def test_nothing_is_learned_from_an_odd_template(name: str) -> None:
    assert answer_template_of(byte_level(), ODD[name]) is None


def test_a_template_that_only_mentions_its_notation_has_a_family_by_its_marks() -> None:
    assert families_of("{{ '<think></think>' }}") == [THINKING]


def test_the_notation_is_shown() -> None:
    tokenizer = byte_level()
    tokenizer.inner.chat_template = TEMPLATES["glm-4.7"]
    assert shown_notation(tokenizer) == (
        "calls as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</tool_call>, reasoning as <think>…</think> "
        f"({LEARNED})"
    )
    tokenizer.inner.chat_template = "{{ messages }}"
    assert shown_notation(tokenizer) == ""


@pytest.mark.parametrize("name", NOTATIONS)
def test_calls_are_the_same_however_their_text_is_cut(name: str) -> None:
    """See `fuzz_calls`, which `make soak` runs for longer."""
    fuzzer, rng = Fuzzer(name), random.Random(1)
    for _ in range(25):
        fuzzer.check(rng)


def test_a_call_without_arguments_before_another_is_one() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {}), ("get-time.v2", {}), CALLS[0]]
    for name in ("qwen3-coder", "glm-4.7", "minimax-m2"):
        text = written(name, *calls)
        assert parts_of(read_all(learned(TEMPLATES[name]).reader("", TOOLS, NAMES), [text])) == tuple(calls)


@pytest.mark.parametrize("name", [name for name in NOTATIONS if name != "harmony"])  # its texts begin in a channel
def test_what_a_grammar_lets_a_model_write_is_a_call(name: str) -> None:
    """Walks at random through the grammar of required calls."""
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    functions = [{"name": each, "parameters": schema, "strict": True} for each in ("weather", "get-time.v2")]
    tokenizer = tokenizer_of(NOTATIONS[name], "as text")
    tools = [{"type": "function", "function": each} for each in functions]
    form = form_of(NOTATIONS[name], tokenizer, tools, "required")
    assert form.structured_output is not None
    grammar, without_thoughts = compiler(tokenizer).compile, replace(form.structured_output, reasoning=None)
    called = set()
    for seed in range(16):
        text = walk(grammar(without_thoughts), tokenizer, random.Random(seed), num_wandering=10)
        parts = parts_of(read_all(form.make_reader(), [text]))
        assert parts
        for part in parts:
            assert isinstance(part, tuple), text
            jsonschema.validate(part[1], schema)
            called.add(part[0])
    assert called == {"weather", "get-time.v2"}


def test_values_within_values_have_the_types_of_their_schema() -> None:
    number, text = {"type": "integer"}, {"type": "string"}
    inner = {"type": "object", "properties": {"n": number, "s": text, "l": {"type": "array", "items": number}}}
    properties = {"o": {"$ref": "#/$defs/inner"}, "all": {"type": "array", "items": {"$ref": "#/$defs/inner"}}}
    schema = {"type": "object", "properties": properties, "$defs": {"inner": inner}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    known = learned(TEMPLATES["minimax-m3"])

    def read(text: str) -> tuple[Any, ...]:
        return parts_of(read_all(known.reader("", tools, ["get_weather"]), [text]))

    given = {"o": {"n": 1, "s": "1", "l": []}, "all": [{"l": [2, 3]}, {"s": "", "n": -1}], "more": {"a": [True, "x"]}}
    text = written("minimax-m3", ("get_weather", given))
    assert read(text) == (("get_weather", given),)
    for wrong in (
        text.replace(f"{M3}<n>1{M3}</n>", f"{M3}<n>1"),
        text.replace(f"{M3}<n>", f"and {M3}<n>"),
        text.replace(f"{M3}<n>1", f"{M3}<s>2{M3}</s>{M3}<n>1"),
        written("minimax-m3", ("get_weather", {"o": given["o"]})).replace(f"{M3}<o>", f"{M3}<o>" + 200 * f"{M3}<a>"),
    ):
        assert not any(isinstance(part, tuple) for part in read(wrong))
