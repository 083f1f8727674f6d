"""`learn`: a family from a chat template alone.

Renders conversations whose names, keys and texts occur nowhere else, and takes what stands between them for the marks
of the notation. Texts are compared by units (a mark, white space, a word, a character), so that no mark is divided.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from transformers.utils.chat_template_utils import render_jinja_template

from inflight.server.chat_format.families import (
    NO_ANCHOR,
    BareJson,
    CallFormat,
    Family,
    Field,
    MarkedArguments,
    calls_field,
)

logger = logging.getLogger(__name__)

LEARNED = "from the chat template"

USER, TEXT, THOUGHT, RESULT = "quxuser", "quxtext", "quxthought", "quxresult"
NAMES = ("quxone", "quxtwo")
ARGUMENTS: Sequence[dict[str, Any]] = ({"quxka": "quxva", "quxkb": "quxvb"}, {"quxkc": 74117, "quxkd": "quxvd"})
TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string" if isinstance(value, str) else "integer", "description": ""}
                    for key, value in each.items()
                },
                "required": [],
            },
        },
    }
    for name, each in zip(NAMES, ARGUMENTS, strict=True)
]

_THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)

_IDS: Sequence[tuple[int | str | None, Callable[[str, int], str]]] = (
    (None, lambda name, index: f"call_{index:024d}"),
    (9, lambda name, index: f"quxidxyz{index}"),
    ("functions.{name}:{index}", "functions.{}:{}".format),
)
"""Forms of ids, tried in this order: some templates refuse all but one, and some write an id in place of the name."""

_MENTIONED = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks of reasoning in templates that only remove it."""

_MARK = re.compile(r"(?:\]<\]\w+\[>\[)?<[^<>\s][^<>]*>|\[/?[A-Z][A-Z_]*\]")
_UNITS = re.compile(rf"{_MARK.pattern}|\s+|\w+|.", re.DOTALL)
_SPACE = r"\s{0,8}"
_PLACE = re.compile(r"(\{(?:name|key|index|id)\})")
_OBJECT = re.compile(r'(?P<before>[^{]*)\{\s*"name":\s*"\{name\}",\s*"(?P<key>arguments|parameters)":\s*')

Probe: TypeAlias = tuple[str, str, Sequence[Any]]
"""A prompt, an answer, and what it consists of: texts, and names and arguments of calls."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A family, and answers by which to check that it reads them."""

    family: Family
    probes: Sequence[Probe]


def learn(chat_template: str) -> Learned | None:
    """Return what a chat template (Jinja) tells about answers; None: nothing regular."""
    try:
        return _Learner(chat_template).learned()
    except Exception as error:  # a template is a program, and can raise anything
        logger.debug("nothing can be learned from the chat template: %r", error)
        return None


def written_call(chat_template: str) -> str | None:
    """An answer with a call of the first of `NAMES`, as a chat template writes it; None: it writes none."""
    for _, new_id in _IDS:
        with suppress(Exception):  # see `learn`
            learner = _Learner(chat_template)
            learner._new_id = new_id
            if NAMES[0] in (text := learner._rendered(learner._calling(1))):
                return text
    return None


def _shared(first: str, second: str, *, from_end: bool = False) -> str:
    """What two texts begin (or end) with; a number that grows by one from the first to the second is "{index}"."""
    pairs = zip(*(_UNITS.findall(each)[:: -1 if from_end else 1] for each in (first, second)), strict=False)
    same = [a if a == b else "{index}" for a, b in takewhile(lambda pair: pair[0] == pair[1] or _is_next(*pair), pairs)]
    return "".join(reversed(same) if from_end else same)


def _is_next(first: str, second: str) -> bool:
    return first.isdecimal() and second.isdecimal() and int(second) == int(first) + 1


def _cut(text: str, shared: str) -> str:
    """A text without what it shares with another at its beginning."""
    return text[len(shared.replace("{index}", "0")) :]


def _pattern(text: str) -> str:
    """The pattern of a text with places, in which white space may differ."""
    written, pieces = "", _PLACE.split(text)
    for piece, behind in zip(pieces, [*pieces[1:], ""], strict=True):
        match piece:
            case "{name}" | "{key}":
                never = "\n" + (behind.lstrip()[:1] or "{") + (" " if behind[:1].isspace() else "")
                never += "" if "<" in never else "<"
                written += rf"(?P<{piece[1:-1]}>[^{re.escape(never)}]{{1,256}})"
            case "{index}":
                written += r"\d{1,9}"
            case "{id}":
                written += r"[\w.:-]{1,300}"
            case _:
                written += _SPACE.join(map(re.escape, re.split(r"\s+", piece)))
    return written


def _edged(text: str) -> str:
    """The same next to a value, to which white space belongs, but for the template's own."""
    inner = text.strip()
    before, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return "".join(f"(?:{each})?" if each.isspace() else _pattern(each) for each in (before, inner, behind) if each)


def _last_mark(text: str) -> str:
    """The end of a text, from its last mark on."""
    marks = list(_MARK.finditer(text))
    return text[marks[-1].start() :] if marks else ""


def _first_mark(text: str) -> str:
    """The mark at the beginning of a text, up to a place; "": none."""
    mark = _MARK.match(text)
    return _PLACE.split(mark[0])[0] if mark else ""


class _Learner:
    """Learns from one template. Raises all kinds of errors for an irregular one."""

    def __init__(self, chat_template: str) -> None:
        self._template = chat_template
        self._new_id = _IDS[0][1]
        self._plain = self._rendered({"content": TEXT})
        before, found, self._end = self._plain.partition(TEXT)
        if not found:
            raise ValueError("an answer is not written")
        asked, prompted = self._rendered(), self._rendered(is_prompt=True)
        opening = _cut(prompted, _shared(asked, prompted))
        self._thoughts = self._find_thoughts(before)
        self._anchor = self._up_to_thoughts(opening) if opening.strip() else _last_mark(self._up_to_thoughts(asked))
        lead = self._behind_thoughts(before.rpartition(self._anchor)[2]).strip() if self._anchor in before else ""
        self._content = lead if _MARK.fullmatch(lead) else ""

    def _rendered(self, *messages: Mapping[str, Any], is_prompt: bool = False) -> str:
        """What the template writes behind a user's text: an answer, a tool's result, and the beginning of another."""
        roles = ("user", "assistant", "tool")
        chat = [{"role": role, **each} for role, each in zip(roles, ({"content": USER}, *messages), strict=False)]
        variables = {"bos_token": "", "eos_token": "", "enable_thinking": True, "thinking": True}
        (written, *_), _ = render_jinja_template(
            [chat], tools=list(TOOLS), chat_template=self._template, add_generation_prompt=is_prompt, **variables
        )
        _, found, behind = written.rpartition(USER)
        if not found:
            raise ValueError("the user's text is not written")
        return str(behind)

    def _calling(self, number: int, **more: Any) -> dict[str, Any]:
        """An assistant's message with calls."""
        calls = [
            {"id": self._new_id(name, index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(zip(NAMES[:number], ARGUMENTS, strict=False))
        ]
        return {"content": "", "tool_calls": calls, **more}

    def learned(self) -> Learned | None:
        """See `learn`."""
        fields: dict[str, Field] = {}
        if self._thoughts is not None:
            fields["reasoning_content"] = dict(zip(("open", "close"), self._thoughts, strict=True))
        content: dict[str, Any] = {"open": self._content} if self._content else {}
        calls, call_format, closing, probes = self._find_calls()
        if calls is not None:
            fields["tool_calls"] = {**calls, "repeats": True}
        if not fields:
            return None
        closes = [_first_mark(self._end.lstrip())] if content else []
        if closes := [*filter(None, closes), *closing]:
            content["close"] = closes
        fields["content"] = content
        anchors = list(dict.fromkeys(filter(str.strip, (self._anchor, *self._anchors_behind_results(calls)))))
        template = {**({"start_anchor": anchors} if anchors else NO_ANCHOR), "fields": fields}
        return Learned(Family(LEARNED, [], template, call_format), [*probes, *self._probes_of_texts(calls)])

    # ------------------------------------------------------------------------------------- around the answer

    def _find_thoughts(self, before: str) -> tuple[str, str] | None:
        """The marks of reasoning; None: there are none."""
        for message in ({"content": TEXT, **_THOUGHT}, self._calling(1, **_THOUGHT)):
            try:
                begun, found, behind = self._rendered(message).partition(THOUGHT)
            except Exception as error:
                logger.debug("reasoning cannot be written: %r", error)
                continue
            begins, ends = _MARK.findall(begun), _first_mark(behind.lstrip())
            is_mark = found and begins and ends and begun.rstrip().endswith(begins[-1])
            if is_mark and (begins[-1] not in before or ends in before):
                return begins[-1], ends
        return next((each for each in _MENTIONED if each[0] in self._template), None)

    def _up_to_thoughts(self, text: str) -> str:
        return text if self._thoughts is None else re.split("|".join(map(re.escape, self._thoughts)), text)[0]

    def _behind_thoughts(self, text: str) -> str:
        return text if self._thoughts is None else re.split("|".join(map(re.escape, self._thoughts)), text)[-1]

    def _without_end(self, text: str) -> str:
        """An answer up to what ends every answer."""
        end = self._end.strip()
        if end and end in text:
            return text.partition(end)[0]
        same = _shared(text.rstrip(), end, from_end=True).strip()
        return text.rpartition(same)[0] if same else text.rstrip()

    def _anchors_behind_results(self, calls: Field | None) -> Iterable[str]:
        """How an answer begins behind a tool's result, if that differs."""
        if calls is None:
            return
        result = {"tool_call_id": self._new_id(NAMES[0], 0), "name": NAMES[0], "content": RESULT}
        try:
            _, found, behind = self._rendered(self._calling(1), result, is_prompt=True).rpartition(RESULT)
        except Exception as error:
            logger.debug("a result cannot be written: %r", error)
            return
        if found and self._anchor not in behind:
            yield _last_mark(self._up_to_thoughts(behind))

    def _probes_of_texts(self, calls: Field | None) -> Iterable[Probe]:
        """Answers with reasoning, content and a call, as far as the template writes them in this order."""
        message = {"content": TEXT, **(_THOUGHT if self._thoughts else {})}
        written = self._rendered(message if calls is None else self._calling(1, **message))
        found = [written.find(each) for each in (THOUGHT, TEXT, NAMES[0])]
        parts: list[Any] = [THOUGHT] if found[0] >= 0 and self._thoughts else []
        if found[1] >= 0 and (found[2] < 0 or found[1] < found[2]) and found[1] > found[0]:
            parts.append(TEXT)
        if not parts or (calls is not None and (found[2] < 0 or self._end.strip() in written[found[1] : found[2]])):
            return
        first = self._thoughts[0] if parts[0] == THOUGHT and self._thoughts else self._content
        begin = written.rfind(first, 0, written.index(parts[0])) if first else written.index(parts[0])
        if calls is not None:
            parts.append((NAMES[0], ARGUMENTS[0]))
        whole = written[begin:].rstrip()
        text = self._without_end(whole)
        last = NAMES[0] if calls is not None else str(parts[-1])
        yield self._anchor, text if last in text else whole, parts

    # ------------------------------------------------------------------------------------- calls

    def _find_calls(self) -> tuple[Field | None, CallFormat | None, Sequence[str], Sequence[Probe]]:
        """The field of calls, their format, the marks behind a group, and an answer; None: they are irregular."""
        for call_id, self._new_id in _IDS:
            for number in (2, 1):
                try:
                    text = self._rendered(self._calling(number))
                    before, found, behind = _cut(text, _shared(self._plain, text)).partition(NAMES[0])
                    written = self._behind_thoughts(before) + found + behind.rstrip()
                    text = self._without_end(written)
                    places = dict.fromkeys(NAMES, "{name}")
                    if not isinstance(call_id, str):
                        places |= {self._new_id(name, index): "{id}" for index, name in enumerate(NAMES)}
                    placed = text
                    for word, place in places.items():
                        placed = placed.replace(word, place)
                    field, call_format, closing = self._notation(placed, number, is_ended=text != written)
                except Exception as error:
                    logger.debug("calls cannot be learned: %r", error)
                    continue
                calls = list(zip(NAMES[:number], ARGUMENTS, strict=False))
                return field, replace(call_format, call_id=call_id), closing, [(self._anchor, text, calls)]
        return None, None, [], []

    def _notation(self, text: str, number: int, *, is_ended: bool) -> tuple[Field, CallFormat, Sequence[str]]:
        """See `_find_calls`. Raises an error if there is none."""
        arguments = _arguments_in(text, number)
        spans = [_span(text, arguments, each) for each in range(number)]
        before, behind, between = text[: spans[0][0]], text[spans[-1][1] :], None
        head, tail = before.lstrip(), behind
        if number > 1:
            middle = text[spans[0][1] : spans[1][0]]
            head = _shared(before, middle, from_end=True).lstrip()
            tail = _shared(middle, behind).rstrip()
            between = _cut(middle[: len(middle) - len(head.replace("{index}", "0"))], tail)
        group = before[: len(before) - len(head.replace("{index}", "0"))].lstrip()
        end = _cut(behind, tail).rstrip()
        mark = _first_mark(group or head)
        if "{name}" not in head or not mark or mark in self._end:
            raise ValueError("there is no mark before calls, or no name in them")
        marks = _MARK.findall(end)
        closing = marks if not _MARK.sub("", end).strip() else [end.strip()]
        if marks and marks[-1] == end.strip() and self._end.strip() and not is_ended and not marks[-1].startswith("</"):
            end = ""  # it ends answers that call
        elif marks:
            end = end[: end.index(marks[0]) + len(marks[0])]
        call_format = CallFormat(
            name=LEARNED,
            begin=mark,
            opening=_cut(group, mark) if group else "",
            head=head if group else head[len(mark) :],
            tail=tail,
            arguments=arguments,
            end=end if group else "",
            between_objects=between if group else None,
            between_groups=None if group else between,
        )
        return _as_objects(call_format) or (_field_of(call_format), call_format, [*filter(None, closing)])


def _between(text: str, *words: str) -> list[str]:
    """What stands before, between and behind words. Raises ValueError if one is missing."""
    pieces = []
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            raise ValueError(f"{word} is not written")
        pieces.append(before)
    return [*pieces, text]


def _arguments_in(text: str, number: int) -> MarkedArguments | BareJson | None:
    """How arguments are written; None: in JSON."""
    words = [word for pair in ARGUMENTS[0].items() for word in pair]
    with suppress(ValueError):
        _span(text, None, 0)
        return None
    _, before, first, between, second, behind = _between(text, "{name}", *words)
    between, behind = between.replace(words[0], "{key}"), behind.replace(words[2], "{key}")
    mark = first[1:]
    if before.strip() == "{" and first == second == f":{mark}" and mark and between == f"{mark},":
        return BareJson(mark)
    begin, end = _shared(before, between, from_end=True).lstrip(), _shared(between, behind)
    end = end if len(begin) + len(end) <= len(between) else end.rstrip()
    if first != second or not begin or not end.strip() or between[len(end) : len(between) - len(begin)].strip():
        raise ValueError("arguments are not written between marks")
    if "{key}" in end and end.replace("</", "<") != f"{begin}{{key}}{first}":
        raise ValueError("an argument's end differs from its beginning")
    other = first if number == 1 else _between(text, *map(str, next(iter(ARGUMENTS[1].items()))))[1]
    return MarkedArguments(f"{begin}{{key}}{first}", end, "" if other == first else f"{begin}{{key}}{other}")


def _span(text: str, arguments: MarkedArguments | BareJson | None, number: int) -> tuple[int, int]:
    """Where the arguments of a call stand. Raises ValueError if they are written in another way."""
    (key, _), (last_key, last) = ARGUMENTS[number].items()
    place, end = text.index(key), text.index(last) + len(last)
    if isinstance(arguments, MarkedArguments):
        written_end = arguments.end.replace("{key}", last_key)
        end += len(written_end if text.startswith(written_end, end) else written_end.rstrip())
        return place - arguments.begin.index("{key}"), end
    begin = text.rindex("{", 0, place)
    if arguments is None:
        written, end = json.JSONDecoder().raw_decode(text, begin)
        if written != ARGUMENTS[number]:
            raise ValueError("arguments are not written in JSON")
        return begin, end
    return begin, text.index("}", end) + 1


def _as_objects(form: CallFormat) -> tuple[Field, CallFormat, Sequence[str]] | None:
    """The same if calls are usual objects: they may have more keys, and their order may differ."""
    parts = _OBJECT.fullmatch(form.head)
    _, found, behind = form.tail.replace("{id}", "").partition("}")
    is_list = form.between_objects is not None
    if form.arguments is not None or parts is None or not found or (is_list and (parts["before"] + behind).strip()):
        return None
    opening, end = form.opening + parts["before"], behind + form.end
    closing = end[: len(end) - len(end.lstrip("] \n\t"))]
    end = _first_mark(end[len(closing) :])
    if opening.strip() not in ("", "["):
        return None
    objects = replace(form, opening=opening, head="", tail="", arguments_key=parts["key"], closing=closing, end=end)
    return {"open": form.begin, **({"close": end} if end else {}), "content": "json"}, objects, []


def _field_of(form: CallFormat) -> Field:
    """The field of calls that have a head."""
    is_grouped, content, more = form.between_objects is not None, "json", dict[str, Any]()
    head, tail = form.head if is_grouped else form.begin + form.head, form.tail.strip()
    before = [form.begin + form.opening, form.between_objects or ""] if is_grouped else []
    opened = "".join(rf"(?:{_pattern(each.strip())}\s{{0,8}})?" for each in before if each.strip()) + _pattern(head)
    close = _pattern(tail) if tail else f"(?={re.escape(_first_mark(head))})"
    match form.arguments:
        case MarkedArguments(begin, end, other):
            if not tail:
                raise ValueError("nothing ends a call")
            content = "xml-inline"
            before_key, _, behind = begin.partition("{key}")
            opened = rf"{opened.removesuffix(_SPACE)}{_SPACE}(?={re.escape(before_key)}|{close})"
            behinds = "|".join(_edged(each) for each in dict.fromkeys((behind, other.partition("{key}")[2] or behind)))
            key = _pattern(f"{before_key}{{key}}{behind}").removesuffix(_pattern(behind))
            ended = _edged(end.rstrip()).replace("(?P<key>", "(?:")
            more["content_args"] = {"tag_pattern": rf"{key}(?:{behinds})(?P<value>.*?){ended}"}
            if form.arguments.is_nested:
                more["content_args"]["nested_values"] = True
        case BareJson(mark):
            more["content_args"] = {"unquoted_keys": True, "string_delims": [[mark, mark]]}
    if head.endswith("{name}") and not isinstance(form.arguments, MarkedArguments):
        opened += rf"(?={_SPACE}\{{)"
    return calls_field(opened, close, content, **more)
