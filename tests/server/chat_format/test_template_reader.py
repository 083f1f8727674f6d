"""Answers in the notations that families of models publish are divided into reasoning, content and calls.

The texts are written after the families' own documents and chat templates. However a text is cut, the pieces are the
same.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from inflight.server.chat_format import families
from inflight.server.chat_format.answer_template import AnswerTemplate, answer_template_of, families_of, family_of
from inflight.server.chat_format.families import Family
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer
from tests.server.chat_format.pieces import CallDelta, Piece, Reasoning, fed, read_all
from tests.server.chat_format.templates import TEMPLATES
from tests.text.tokenizers_for_tests import byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
            },
        },
    }
    for name in ("get_weather", "get-time.v2")
]
NAMES = ["get_weather", "get-time.v2"]
DEEPSEEK_R1, DEEPSEEK, QWEN_XML, GLM = (
    families_of(TEMPLATES[name])[0] for name in ("deepseek-r1", "deepseek-v3.1", "qwen3-coder", "glm-4.5")
)
Call = tuple[str, Any]


@dataclass(frozen=True)
class Recorded:
    """An answer and what is in it: reasoning, contents and calls in order; a call is its name and its arguments."""

    family: Family
    prompt: str
    text: str
    parts: tuple[Any, ...]


T = Reasoning
PARIS, ROME = ("get_weather", {"city": "Paris", "days": 2}), ("get_weather", {"city": "Rome"})
RECORDED = {
    "gpt-oss: a call": Recorded(
        families.HARMONY,
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris","days":2}',
        (T("Need to use function get_weather."), PARIS),
    ),
    "gpt-oss: the recipient before the channel": Recorded(
        families.HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant to=functions.get-time.v2<|channel|>commentary json"
        '<|message|>{"city":"Rome"}<|call|>',
        (T("A."), ("get-time.v2", {"city": "Rome"})),
    ),
    "gpt-oss: a preamble, and reasoning in two parts": Recorded(
        families.HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis<|message|>Second.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>**Plan**: look it up.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        (T("First.\n\nSecond."), "**Plan**: look it up.", ROME),
    ),
    "gpt-oss: an answer in JSON": Recorded(
        families.HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
        '{"a": 1}',
        (T("Hm."), '{"a": 1}'),
    ),
    "gemma 4": Recorded(
        families.GEMMA4,
        "<bos><|turn>user\nWeather?<turn|>\n<|turn>model\n",
        '<|channel>thought\nLet me\nsee.<channel|>Sure.<|tool_call>call:get_weather{city:<|"|>Pa"ris: {x}<|"|>,days:2}'
        "<tool_call|>",
        (T("Let me\nsee."), "Sure.", ("get_weather", {"city": 'Pa"ris: {x}', "days": 2})),
    ),
    "gemma 4: behind a tool's result": Recorded(
        families.GEMMA4,
        "<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>response:f{value:3}<tool_response|>",
        "It is 3.",
        ("It is 3.",),
    ),
    "deepseek-r1": Recorded(
        DEEPSEEK_R1,
        "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜><think>\n",
        "They want the weather.\n</think>\n\nOne moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        (T("They want the weather."), "One moment.", PARIS, ROME),
    ),
    "deepseek-v3.1": Recorded(
        DEEPSEEK,
        "<｜User｜>Weather?<｜Assistant｜></think>",
        'One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("One moment.", ROME),
    ),
    "qwen3": Recorded(
        families.HERMES,
        "<|im_start|>system\nCall <tool_call>{}</tool_call><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n",
        '<think>\nParis, "then" Rome.\n\nYes.\n</think>\n\nSure.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Rome"}}\n</tool_call>',
        (T('Paris, "then" Rome.\n\nYes.'), "Sure.", PARIS, ROME),
    ),
    "qwen3: not thinking": Recorded(
        families.HERMES,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Two\n\nparagraphs, <b>.",
        ("Two\n\nparagraphs, <b>.",),
    ),
    "qwen3: the prompt has begun the reasoning": Recorded(
        families.HERMES,
        "<|im_start|>assistant\n<think>\n",
        "Hm.\n</think>\n\nHello.",
        (T("Hm."), "Hello."),
    ),
    "qwen3: cut off in reasoning": Recorded(
        families.HERMES, "<|im_start|>assistant\n", "<think>\nHm, I", (T("Hm, I"),)
    ),
    "hermes 2 pro": Recorded(
        families.HERMES,
        "<|im_start|>assistant\n",
        '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>',
        (ROME,),
    ),
    "hermes: calls that cannot be made are content": Recorded(
        families.HERMES,
        "<|im_start|>assistant\n",
        'Use <tool_call> {"name": "other", "arguments": {}} </tool_call> or\n<tool_call>no JSON</tool_call>\nor '
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call> or <tool_call>{"name": "get_w',
        (
            'Use <tool_call> {"name": "other", "arguments": {}} </tool_call> or\n<tool_call>no JSON</tool_call>\nor '
            '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call> or <tool_call>{"name": "get_w',
        ),
    ),
    "qwen3-coder": Recorded(
        QWEN_XML,
        "<|im_start|>assistant\n",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n  x\n</parameter>\n<parameter=days>"
        "\n3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
        ("I look.", ("get_weather", {"city": "Paris\n  x", "days": 3, "exact": True})),
    ),
    "qwen3-coder: cut off": Recorded(
        QWEN_XML,
        "<|im_start|>assistant\n",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=da",
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=da",),
    ),
    "qwen3.5": Recorded(
        QWEN_XML,
        "<|im_start|>assistant\n<think>\n",
        "Hm.\n</think>\n\n<tool_call>\n<function=get-time.v2>\n</function>\n</tool_call>",
        (T("Hm."), ("get-time.v2", {})),
    ),
    "glm-4.5": Recorded(
        GLM,
        "[gMASK]<sop><|user|>\nWeather?<|assistant|>",
        "\n<think>Both.</think>\n\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get-time.v2\n</tool_call>",
        (T("Both."), PARIS, ("get-time.v2", {})),
    ),
    "mistral small 3.2": Recorded(
        families.MISTRAL,
        "<s>[INST]Weather?[/INST]",
        'Sure.[TOOL_CALLS]get_weather[CALL_ID]Xc3kPq9aB[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]get_weather[ARGS]'
        '{"city": "Rome"}',
        ("Sure.", PARIS, ROME),
    ),
    "magistral": Recorded(
        families.MISTRAL,
        "[SYSTEM_PROMPT]Think in [THINK]draft[/THINK].[/SYSTEM_PROMPT][INST]Hi[/INST]",
        "[THINK]A greeting.[/THINK]Hello.",
        (T("A greeting."), "Hello."),
    ),
    "lfm2": Recorded(
        families.LFM2,
        "<|im_start|>assistant\n",
        """<think>Hm.</think>Now.<|tool_call_start|>[get_weather(city='Pa"ris](', days=2), get-time.v2(exact=True)]"""
        "<|tool_call_end|>",
        (T("Hm."), "Now.", ("get_weather", {"city": 'Pa"ris](', "days": 2}), ("get-time.v2", {"exact": True})),
    ),
    "others that think": Recorded(
        families.THINKING, "user: hi\nassistant: <think>\n", "Hm.</think>Hello", (T("Hm."), "Hello")
    ),
}


WRITE = [
    {
        "type": "function",
        "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}, "path": {}}}},
    }
]
CHATML, HARMONY = "<|im_start|>assistant\n", "<|start|>assistant"


def xml(*texts: str) -> str:
    written = "".join(f"<parameter=text>\n{text}\n</parameter>\n" for text in texts)
    return f"<tool_call>\n<function=write>\n{written}</function>\n</tool_call>"


def in_json(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'text': text}})}\n</tool_call>"


def writing(text: str) -> tuple[str, Any]:
    return "write", {"text": text}


def bare(body: str) -> str:
    return f"<|tool_call>call:write{body}<tool_call|>"


def commentary(head: str, text: str) -> str:
    return f"<|channel|>commentary{head}<|message|>{json.dumps({'text': text})}"


IN_VALUES = [
    *("x = '</parameter>'\ny = 2", "a <parameter=x> b", "a\n</function>\n</tool_call>", "</think>", "", "\n"),
    *("a\n</parameter>\n</function>\n</tool_call>\nb", "a\n</parameter>\n<parameter=other>\nb", xml("a")[:-30]),
]
UNCLOSED = "<tool_call>\n<function=write>\n<parameter=text>\nhello\n</function>\n</tool_call>"
TORN = f"{xml('a')} b\n</function></tool_call"
HARD = {
    **{f"xml: {text!r}": Recorded(QWEN_XML, CHATML, xml(text), (writing(text),)) for text in IN_VALUES},
    **{
        f"xml, among others: {text!r}": Recorded(
            QWEN_XML,
            CHATML,
            f"I do.\n{xml('1')}\n{xml(text)} And\n{xml('2')}\nmore.",
            ("I do.", writing("1"), writing(text), " And", writing("2"), "\nmore."),
        )
        for text in IN_VALUES
    },
    "xml: a value that is not closed": Recorded(QWEN_XML, CHATML, UNCLOSED, (UNCLOSED,)),
    "xml: a closing mark too many": Recorded(QWEN_XML, CHATML, f"{TORN}> c", (f"{TORN}> c",)),
    "xml: twice the same key": Recorded(
        QWEN_XML, CHATML, xml("a", "b"), (writing("a\n</parameter>\n<parameter=text>\nb"),)
    ),
    "hermes: marks in strings": Recorded(
        families.HERMES,
        CHATML,
        f"Hi.{in_json('</tool_call>')}\n{in_json('</think><tool_call>{')} b",
        ("Hi.", writing("</tool_call>"), writing("</think><tool_call>{"), " b"),
    ),
    "hermes: a string without an end": Recorded(
        families.HERMES,
        CHATML,
        f'<tool_call>{{"name": "write", "arguments": {{"text": "a</tool_call>\n{in_json("b")}',
        ('<tool_call>{"name": "write", "arguments": {"text": "a</tool_call>', writing("b")),
    ),
    "harmony: marks in strings": Recorded(
        families.HARMONY,
        HARMONY,
        f"{commentary(' to=functions.write json', '<|call|>')}<|call|><|start|>assistant<|channel|>final<|message|>b",
        (writing("<|call|>"), "b"),
    ),
    **{
        f"harmony: {head}": Recorded(families.HARMONY, HARMONY, f"{commentary(head, 'a')}<|call|>", (writing("a"),))
        for head in ("<|constrain|>json to=functions.write", " <|constrain|>json to=functions.write")
    },
    "gemma: keys": Recorded(
        families.GEMMA4,
        "<|turn>model\n",
        bare('{ my-key:1, my.key : [2],\nmy key:<|"|>a<tool_call|>b<|"|>}'),
        (("write", {"my-key": 1, "my.key": [2], "my key": "a<tool_call|>b"}),),
    ),
    "a call in reasoning": Recorded(
        families.HERMES, CHATML, f"<think>\nplan <tool_call>? {in_json('a')}", (T("plan <tool_call>?"), writing("a"))
    ),
    "two calls in reasoning that the prompt has begun": Recorded(
        QWEN_XML,
        f"{CHATML}<think>\n",
        f"plan\n{xml('a')}\n{xml('b')}",
        (T("plan"), writing("a"), writing("b")),
    ),
    "a call in reasoning that is closed": Recorded(
        families.HERMES, CHATML, f"<think>plan {in_json('a')}</think>b", (T(f"plan {in_json('a')}"), "b")
    ),
    "half a call in reasoning": Recorded(
        families.HERMES, CHATML, '<think>plan <tool_call>{"na', (T('plan <tool_call>{"na'),)
    ),
}


def read(recorded: Recorded, pieces: list[str], **options: Any) -> list[Piece]:
    reader = AnswerTemplate(recorded.family.template, recorded.family).reader(
        recorded.prompt, [*TOOLS, *WRITE], [*NAMES, "write"], **options
    )
    return read_all(reader, pieces)


def parts_of(pieces: list[Piece]) -> tuple[Any, ...]:
    """Pieces put together."""
    parts: list[Any] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        if isinstance(piece, CallDelta):
            if piece.name is not None:
                parts.append([piece.name, ""])
            parts[-1][1] += piece.arguments
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            parts[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, str) and isinstance(last, str):
            parts[-1] = last + piece
        else:
            parts.append(piece)
    return tuple((part[0], json.loads(part[1])) if isinstance(part, list) else part for part in parts)


@pytest.mark.parametrize("name", [*RECORDED, *HARD])
def test_answers_are_divided_however_they_are_cut(name: str) -> None:
    recorded = {**RECORDED, **HARD}[name]
    text = recorded.text
    assert parts_of(read(recorded, [text])) == recorded.parts
    for place in range(1, len(text)):
        assert parts_of(read(recorded, [text[:place], text[place:]])) == recorded.parts, text[:place]
    assert parts_of(read(recorded, list(text))) == recorded.parts


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in ("qwen3-coder: cut off", "lfm2")])
def test_the_library_reads_the_same_calls_and_reasoning(name: str) -> None:
    recorded = RECORDED[name]
    try:
        message = parse_response(recorded.text, dict(recorded.family.template), prefix=recorded.prompt, tools=TOOLS)
    except ValueError:
        assert "cannot be made" in name
        return
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", [])]
    assert calls == [part for part in recorded.parts if isinstance(part, tuple)]
    reasoning = [part.text for part in recorded.parts if isinstance(part, Reasoning)]
    assert (message.get("reasoning_content") or "") == "".join(reasoning)


def test_reasoning_and_content_are_given_as_they_come() -> None:
    recorded = RECORDED["qwen3"]
    reader = AnswerTemplate(recorded.family.template, recorded.family).reader(recorded.prompt, TOOLS, NAMES)
    assert fed(reader, "<think>\nPar") == [Reasoning("Par")]
    assert fed(reader, "is") == [Reasoning("is")]
    assert fed(reader, "</thi") == []
    assert fed(reader, "nk>\n\nSu") == ["Su"]
    assert fed(reader, "re.\n") == ["re."]


def test_only_the_first_call_is_reported_without_parallel_calls() -> None:
    recorded = RECORDED["qwen3"]
    assert parts_of(read(recorded, [recorded.text], is_parallel=False)) == recorded.parts[:-1]


@given(st.text(alphabet=st.sampled_from(' \nab<>/|[]{}"thinkcal_'), max_size=60), st.integers(0, 60))
def test_a_text_without_marks_is_content_as_it_is(text: str, place: int) -> None:
    recorded = Recorded(families.HERMES, "<|im_start|>assistant\n", text, ())
    if "<think>" in text or "<tool_call>" in text:
        return
    assert "".join(map(str, read(recorded, [text[:place], text[place:]]))) == text


# ------------------------------------------------------------------------------------- which template a model has


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|start|>{{ role }}<|channel|>final<|message|>", families.HARMONY),
        ("<|turn>model <|tool_call>call:", families.GEMMA4),
        ("<tool_call>", families.HERMES),
        ("[TOOL_CALLS]{{ name }}[ARGS]", families.MISTRAL),
        ("[TOOL_CALLS] [{{ call }}]", None),
        ("{{ x.split('</think>')[-1] }}", families.THINKING),
        ("{{ messages }}", None),
    ],
)
def test_the_family_is_recognised_from_the_chat_template(template: str, family: Family | None) -> None:
    assert family_of(template) is family


def test_models_of_a_family_that_do_not_think_have_no_reasoning() -> None:
    tokenizer = byte_level()
    for template in ("<tool_call> {{ '<think>' }}", "<|tool_call> {{ '<|channel>thought\\n' }}"):
        thinking = answer_template_of(tokenizer, template)
        assert thinking is not None
        assert thinking.has_reasoning
    plain = answer_template_of(tokenizer, "<tool_call>")
    assert plain is not None
    assert not plain.has_reasoning


def own(template: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.inner.chat_template = "{{ messages }}"
    tokenizer.inner.response_template = template
    return tokenizer


def test_the_tokenizers_own_template_counts_before_the_familys() -> None:
    template = {
        "start_anchor": "A:",
        "fields": {"thinking": {"open": "((", "close": "))"}, "content": {}, "tool_calls": {"open": "!", "close": "?"}},
    }
    known = answer_template_of(own(template), "{{ messages }}")
    assert known is not None
    reader = known.reader("A:((", None, ())
    assert parts_of(read_all(reader, ["hm)) yes!"])) == (Reasoning("hm"), "yes!")
    assert answer_template_of(own(template), "the request's own") is None


@pytest.mark.parametrize(
    "field",
    [
        {"open": 3},
        {"open": "!", "content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>)(?P<value>))"}},
        {"open": "!", "content": "kv-lines", "content_args": {"value_parser": {"args": {"tag_pattern": "x"}}}},
    ],
)
def test_a_template_that_cannot_be_read_is_said_and_left(field: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        template = {"start_anchor": "A:", "fields": {"tool_calls": field}}
        assert answer_template_of(own(template), "{{ messages }}") is None
    assert "the tokenizer's response template cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "body", "arguments"),
    [
        (r"<p (?P<key>\w+)>(?P<value>(?:.|\n)*?)</p>", "<p text>a</p> b</p>", {"text": "a</p> b"}),
        (r"<p (?P<key>\w+)>(?P<value>(?:.|\n)*?)</p>", "<p text>a b", None),
        (r"<p (?P<value>\d*)=(?P<key>\w+)>", "<p 3=text>", {"text": "3"}),
        (r"<p (?P<value>\d*)=(?P<key>\w+)>", "<p 3=text> 4", None),
    ],
)
def test_the_tokenizers_own_notation_of_values_loses_nothing(pattern: str, body: str, arguments: Any) -> None:
    calls = {
        "open_pattern": r"<call (?P<name>\w+)>",
        "close": "</call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    reader = AnswerTemplate({**families.NO_ANCHOR, "fields": {"content": {}, "tool_calls": calls}}).reader(
        "", WRITE, ["write"]
    )
    text = f"<call write>{body}</call>"
    read = parts_of(read_all(reader, [text]))
    assert read == ((text,) if arguments is None else (("write", arguments),))


SLOW = "(?:a|aa)+$"
CALLING = {"open": "!", "content": "xml-inline", "transform": "{content}"}


@pytest.mark.parametrize(
    ("field", "template"),
    [
        ("start_anchor", {"start_anchor_pattern": SLOW, "fields": {"content": {}}}),
        ("content", {"fields": {"content": {"open_pattern": SLOW}}}),
        ("thinking", {"fields": {"thinking": {"open": "!", "close_pattern": SLOW}}}),
        ("tool_calls", {"fields": {"tool_calls": {**CALLING, "close_pattern": SLOW, "content": "json"}}}),
        *(
            ("tool_calls", {"fields": {"tool_calls": {**CALLING, "close": "?", "content_args": {"tag_pattern": tag}}}})
            for tag in (SLOW, f"{SLOW}(?P<key>x)(?P<value>y)", "(?P<key>a)(?P<value>.)x(?:a|aa)+b")
        ),
    ],
)
def test_a_pattern_that_takes_for_ever_is_an_error_of_this_request(field: str, template: dict[str, Any]) -> None:
    text = f"!{'a' * 60}b?"
    known = AnswerTemplate({**families.NO_ANCHOR, **template})
    prompt = text if field == "start_anchor" else ""

    def read() -> None:
        reader = known.reader(prompt, TOOLS, NAMES)
        read_all(reader, [text])

    with pytest.raises(ApiError, match=f"a pattern of '{field}' in this model's response template takes too long"):
        read()


def test_marks_that_are_special_tokens_are_found() -> None:
    tokenizer = byte_level()
    tokenizer.inner.add_tokens(["<|channel|>", "<|im_end|>"], special_tokens=True)
    tokenizer.inner.add_tokens(["<think>"], special_tokens=False)
    channel = tokenizer.inner.convert_tokens_to_ids("<|channel|>")
    for family, token_ids in ((families.HARMONY, {channel}), (families.HERMES, set()), (families.THINKING, set())):
        assert AnswerTemplate(family.template, family).special_token_ids(tokenizer) == token_ids


@pytest.mark.parametrize(
    ("family", "prompt", "is_begun", "empty"),
    [
        (families.HERMES, "<|im_start|>assistant\n", False, "<think>\n\n</think>\n\n"),
        (families.HERMES, "<think> <|im_start|>assistant\n<think>\n", True, "\n</think>\n\n"),
        (families.HERMES, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, "<think>\n\n</think>\n\n"),
        (families.THINKING, "assistant:<think>", True, "\n</think>\n\n"),
        (families.THINKING, "<think> assistant:", False, "<think>\n\n</think>\n\n"),
        (families.HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", True, None),
    ],
)
def test_where_the_prompt_ends(family: Family, prompt: str, is_begun: bool, empty: str | None) -> None:
    template = AnswerTemplate(family.template, family)
    assert template.begins_in_reasoning(prompt) == is_begun
    assert template.empty_reasoning(prompt) == empty


# ------------------------------------------------------------------------------------- prompts that have begun


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("family", "begun", "text", "parts"),
    [
        (families.HERMES, f"{CALL}\nok", f"\n{CALL}", (ROME,)),
        (families.HERMES, f"{CALL}\nok", " hello", (" hello",)),
        (families.HERMES, CALL, "\nhello", ("\nhello",)),
        (families.HERMES, "<think>\nHm", "mm.</think>\nHi", (T("mm."), "Hi")),
        (families.GEMMA4, "Hi<turn|>\n<|turn>user\nyo", "abcdefghijklmnop", ("abcdefghijklmnop",)),
        (DEEPSEEK, "Hi<｜tool▁calls▁end｜>", "abcdefghijklmnop", ("abcdefghijklmnop",)),
        (families.HARMONY, "", "Hello there", ("Hello there",)),
        (families.HARMONY, "", '<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>', None),
    ],
)
def test_what_the_prompt_has_is_not_reported_and_nothing_else_is_lost(
    family: Family, begun: str, text: str, parts: tuple[Any, ...] | None
) -> None:
    anchor = family.template["start_anchor"]
    prompt = f"{anchor if isinstance(anchor, str) else anchor[0]}{begun}"
    for pieces in ([text], list(text)):
        reader = AnswerTemplate(family.template, family).reader(prompt, TOOLS, NAMES, is_parallel=False)
        read = read_all(reader, pieces)
        assert parts_of(read) == (parts or (text,))
        assert reader.num_calls == sum(isinstance(part, tuple) for part in parts or ())


@pytest.mark.parametrize(
    "arguments", ['{"city": "\\ud83d"}', '{"city":  "\\u00e9\\/é",\n"days": 10E-1}', '{"arguments": {"city": "a"}}']
)
def test_arguments_in_json_stay_as_they_were_written(arguments: str) -> None:
    for family, prompt, text in (
        (families.HERMES, CHATML, f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'),
        (families.HARMONY, HARMONY, f"<|channel|>commentary to=functions.get_weather<|message|>{arguments}<|call|>"),
    ):
        pieces = read(Recorded(family, prompt, text, ()), [text])
        assert "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta)) == arguments


@pytest.mark.parametrize(
    "family",
    [
        *(each for each in (*families.FAMILIES, *families.FALLBACKS) if each.template),
        *(families_of(TEMPLATES[name])[0] for name in TEMPLATES if name != "mistral-nemo"),
    ],
)
@pytest.mark.parametrize(
    "opened",
    ["<tool_call>", "<tool_call><function=", "[TOOL_CALLS]", " to=functions.", "<|channel|>", "<|tool_call>call:", " "],
)
def test_a_mark_that_never_ends_is_not_searched_for_for_ever(family: Family, opened: str) -> None:
    """What is held back is bounded, so that long texts take no quadratic time."""
    reader = AnswerTemplate(family.template, family).reader("", TOOLS, NAMES)
    reader.feed(opened)
    for _ in range(300):
        reader.feed("abcd")
    searched = reader._position if reader._call is None else reader._call.searched
    assert len(reader._text) - searched < 600
