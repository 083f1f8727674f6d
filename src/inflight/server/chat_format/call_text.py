"""`CallText`: the text of one call, as a response template describes it: its end and its content.

Decides which closing marks belong to a value. JSON says itself where it ends, and its arguments are passed on as they
were written. In notations that put values between marks of their own, any mark may be part of a value: one that closes
a value stands before the next property of the schema, or at the end of the call. What cannot be read as a whole is no
call; it is never a shorter one.
"""

import ast
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import Any, TypeAlias

import msgspec
import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing import response_templates as hf
from transformers.utils.chat_parsing.content_parsers import process_field

from inflight.contracts.api.options import is_text
from inflight.server.chat_format.nested_arguments import read_nested
from inflight.server.wire.api_errors import ApiError

logger = logging.getLogger(__name__)

MOST_SECONDS = 0.2
"""Of an answer's slow searches together. (`regex` counts the processor time of all threads of the process.)"""

FREE_SECONDS = 0.001
"""So much of each search does not count: usual ones take microseconds, and a long answer needs many."""

_TOLD_APART = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_SPACE = regex.compile(r"\s*+")
_VALUE = regex.compile(r"\(\?P<value>((?:[^()\\]|\\.|\((?1)\))*)\)", regex.DOTALL)
_CAST = hf.load_response_template(
    {"start_anchor_pattern": "(?!)", "fields": {"calls": {"open": "!", "content": "json"}}}
)
"""Reads calls in JSON; all that it adds is that arguments get the types of their schema."""


Calls: TypeAlias = list[tuple[str, str]]
"""Names and arguments in JSON of complete calls."""


class SearchBudget:
    """The time that is left for the patterns of a checkpoint to read one answer.

    Their time may grow exponentially with the text, and reading runs on the event loop: the bound is what one such
    answer may cost all other requests. (`regex` releases the interpreter's lock meanwhile.)
    """

    def __init__(self) -> None:
        self._left = MOST_SECONDS

    def search(self, field: str, find: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of a method of a compiled pattern; for a method that finds several matches, all of them.

        Args:
            field: where in the response template the pattern stands.

        Raises ApiError when the time is over.
        """
        begin = thread_time()
        try:
            found = find(*args, **options, timeout=max(self._left, FREE_SECONDS))
            return list(found) if isinstance(found, Iterator) else found
        except TimeoutError as error:
            message = f"a pattern of {field!r} in this model's response template takes too long to read this answer"
            raise ApiError(500, message, code="slow_response_template") from error
        finally:
            self._left -= max(thread_time() - begin - FREE_SECONDS, 0)


class ObjectScanner:
    """Finds the end of a JSON object whose text arrives in pieces, without checking that it is valid JSON.

    Attributes:
        is_in_string: whether the text so far ends within a string.
    """

    def __init__(self) -> None:
        self.is_in_string = False
        self._depth = 0
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return how many characters of `text` belong to the object; None: all of them, and more will follow."""
        begin = int(self._is_escaped and text != "")
        self._is_escaped = self._is_escaped and not begin
        for match in _TOLD_APART.finditer(text, begin):
            match match[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self.is_in_string = not self.is_in_string
                case "{" | "[" if not self.is_in_string:
                    self._depth += 1
                case "}" | "]" if not self.is_in_string:
                    self._depth -= 1
                    if self._depth <= 0:
                        return match.end()
        return None


class CallText:
    """The notation of calls.

    Args:
        field: the field of calls.
        tools: the tools that the model was told about, in OpenAI's form.
        names: the names of those that may be called.
        budget: the time for searches.
        is_bare: whether an object at the beginning of content is a call, too; one that only has a name may be anything.
        heads: how calls begin that a grammar guarantees, and their tools' names; of opening marks that have the name,
            only the names count.

    Raises ValueError, regex.error: the field's patterns cannot be used.

    Attributes:
        is_json: whether calls are objects of JSON, which tell where they end.
        open_first: the opening mark before anything else.
    """

    def __init__(
        self,
        field: hf.ResponseTemplateField,
        tools: Sequence[Mapping[str, Any]],
        names: Collection[str],
        budget: SearchBudget,
        *,
        is_bare: bool = False,
        heads: Mapping[str, str] | None = None,
    ) -> None:
        if "tag_pattern" in repr(field.content_args.get("value_parser")):
            raise ValueError(f"{field.name} has a pattern for values within values, whose time cannot be bounded")
        self.field, self._search = field, partial(budget.search, field.name)
        self.heads = heads or {}
        self._tools, self._names = list(tools), names
        self._default: dict[str, Any] | None = None if is_bare else {}
        self.open_first = regex.compile(rf"{field.open_re.pattern}|\G\s*+(?=\{{)") if is_bare else field.open_re
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._keys = {name: _keys_of(schema) for name, schema in self._schemas.items()}
        self.is_json = field.content == "json" and not field.content_args.keys() & {"string_delims", "python_calls"}
        begin, end = (r"[{\[]", r"[}\]]") if field.content == "json" else ("", "")
        pattern = field.content_args.get("tag_pattern", "")
        value = _VALUE.search(pattern)
        self._tags = regex.compile(pattern, regex.DOTALL)
        self._is_marked = value is not None and "(?P<key>" in pattern[: value.start()]
        if value is not None and self._is_marked:
            begin, end = f"(?:{pattern[: value.start()]})", f"(?:{pattern[value.end() :]})"
        self._marks = regex.compile(begin, regex.DOTALL)
        self._between = regex.compile(rf"{end}\s*{begin}", regex.DOTALL)
        self._begins = regex.compile(rf"\s*(?:{begin}|\Z)" if self._is_marked else rf"\s*{begin}", regex.DOTALL)
        self._ends = regex.compile(rf"(?r){end}\s*", regex.DOTALL)

    def may_begin(self, text: str, start: int, end: int) -> bool:
        """Whether what stands between an opening mark and `end` may be a call."""
        return self._search(self._begins.match, text, start, end) is not None

    def may_end(self, text: str, start: int, end: int) -> bool:
        """Whether a closing mark at `end` may be that of the call whose opening mark ends at `start`."""
        is_empty = self._is_marked and _SPACE.fullmatch(text, start, end) is not None
        return is_empty or (
            self.may_begin(text, start, end) and self._search(self._ends.match, text, start, end) is not None
        )

    def opening(self, text: str, start: int, close: Any) -> Any:
        """The first opening mark from `start` on behind which a call may stand that `close` ends; None: there is none.

        Marks are matches in the text."""
        while mark := self._search(self.field.open_re.search, text, start, close.end()):
            is_known = mark.groupdict().get("name") in (None, *self._names)
            if is_known and mark.end() <= close.start() and self.may_begin(text, mark.end(), close.start()):
                return mark
            start = max(mark.end(), start + 1)
        return None

    def read(self, opened: Any, body: str, *, is_in_list: bool = False) -> Calls | None:
        """Read the calls that stand behind an opening mark (its match); None: there are none that can be made."""
        captures = {name: each for name, each in opened.groupdict().items() if each is not None}
        try:
            whole = f"[{body}]" if is_in_list else body
            value = process_field(*self._prepared(whole, captures.get("name")), captures)
            calls = json.dumps(value if isinstance(value, list) else [value])
            read: Calls = []
            for each in parse_response(f"!{calls}", _CAST, prefix="", tools=self._tools).get("calls") or []:
                function = each.get("function", each)
                name, arguments = function["name"], function.get("arguments", function.get("parameters", self._default))
                if name not in self._names or not isinstance(arguments, dict):
                    return None
                read.append((name, _written(body, arguments)))
        except ApiError:
            raise
        except Exception as error:  # the patterns are the checkpoint's, and the text is the model's
            logger.debug("a call cannot be read: %r", error)
            return None
        return read or None

    def _prepared(self, body: str, name: str | None) -> tuple[str, hf.ResponseTemplateField]:
        """The text between a call's marks in a form that the library reads completely, and the field for it."""
        args = self.field.content_args
        if args.get("nested_values"):
            marks = self._search(self._marks.finditer, body)
            written = read_nested(body, marks, self._schemas.get(name or ""))
            return json.dumps(written), replace(self.field, content="json", content_args={})
        if self._is_marked:
            return json.dumps(self._marked(body, name)), replace(self.field, content="json", content_args={})
        if (delims := args.get("string_delims", [])) or args.get("unquoted_keys"):
            return _as_json(body, delims), replace(self.field, content="json", content_args={})
        if args.get("python_calls"):
            return json.dumps(_python_calls(body)), replace(self.field, content_args={})
        if "tag_pattern" in args and self._search(self._tags.sub, "", body).strip():  # the library needs as long
            raise ValueError("there is text outside of the marks")
        return body, self.field

    def _marked(self, body: str, name: str | None) -> dict[str, str]:
        """Arguments that are written one by one between marks. Raises ValueError if they cannot be told apart."""
        if not body.strip():
            return {}
        first, last = self._search(self._begins.match, body), self._search(self._ends.match, body)
        keys = None if name is None else self._keys.get(name)
        between = self._search(self._between.finditer, body, first.end(), last.start())
        marks = [
            first,
            *(each for each in between if each["key"] != first["key"] and (keys is None or each["key"] in keys)),
        ]
        ends = [*(mark.start() for mark in marks[1:]), last.start()]
        return _unique([(mark["key"], body[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)])


class _Raw(msgspec.Struct):
    """Arguments under either of the keys that models use."""

    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _written(body: str, arguments: dict[str, Any]) -> str:
    """Return arguments as the model wrote them, if it wrote these; else as we do. Raises ValueError for NaN."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    with suppress(ValueError):
        raw = msgspec.json.decode(body, type=_Raw)
        for text in (bytes(raw.arguments).decode(), bytes(raw.parameters).decode(), body.strip()):
            if text and json.loads(text) == arguments:
                return text
    return written if is_text(written) else json.dumps(arguments, allow_nan=False)


def _keys_of(parameters: Any) -> Collection[str] | None:
    """The keys that a tool's schema names; None: any key may come."""
    if not isinstance(parameters, dict) or parameters.get("additionalProperties"):
        return None
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) and properties else None


def _as_json(text: str, string_delims: Sequence[Sequence[str]]) -> str:
    """Write JSON in which keys may have no quotes, and strings marks of their own, as JSON.

    Raises ValueError if it cannot be told where a string ends."""
    alternatives = [r'"(?:[^"\\]|\\.)*+"', r'(?P<before>[{,]\s*)(?P<key>[^\s"{}\[\]:,][^"{}\[\]:,]*?)\s*:']
    for begin, end in string_delims:
        begin, end = regex.escape(begin), regex.escape(end)
        alternatives += [rf"{begin}(?P<string>.*?){end}(?=\s*(?:[,:}}\]]|\Z))", f"(?P<unclosed>{begin})"]

    def written(match: Any) -> str:
        found = match.groupdict()
        if found.get("unclosed") is not None:
            raise ValueError("a string has no end")
        if found.get("string") is not None:
            return json.dumps(found["string"])
        return match[0] if found["key"] is None else f"{found['before']}{json.dumps(found['key'])}:"

    found = regex.sub("|".join(alternatives), written, text, flags=regex.DOTALL)
    return json.dumps(json.loads(found, object_pairs_hook=_unique))


_WORDS = re.compile(r"""(?s)"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?P<name>[\w.-]+)(?=[(=])|\b(?:true|false|null)\b""")


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Read a list of calls in Python whose literals may be JSON's. Raises ValueError, SyntaxError."""
    names: list[str] = []

    def in_python(match: re.Match[str]) -> str:
        if match["name"] is not None:  # or a key; it may be no identifier
            names.append(match["name"])
            return f"_{len(names) - 1}"
        with suppress(ValueError):
            return repr(json.loads(match[0]))
        return match[0]

    calls = []
    for call in ast.parse(_WORDS.sub(in_python, text.strip()), mode="eval").body.elts:  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("this is no call with arguments by name")
        keys = [names[int((each.arg or "")[1:])] for each in call.keywords]
        values = [ast.literal_eval(each.value) for each in call.keywords]
        given = _unique(list(zip(keys, values, strict=True)))
        calls.append({"name": names[int(call.func.id[1:])], "arguments": given})
    return calls


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError if two values have the same key: one of them may be a part of another value."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("two values have the same key")
    return found
