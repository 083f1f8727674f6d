"""`read_nested`: arguments whose objects and arrays are written like arguments, `<city><name>Paris</name></city>`.

The marks have no types: what is no object and no array is a string where the schema permits one, else JSON.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from inflight.server.chat_format.call_grammar import may_be_text, resolved, types_of
from inflight.server.chat_format.families import ITEM
from inflight.server.wire.json_route import MAX_DEPTH

Written: TypeAlias = "str | list[tuple[str, Written]]"
"""A text, or keys and values."""


def read_nested(body: str, marks: Iterable[Any], parameters: Any) -> dict[str, Any]:
    """Return the arguments of a call.

    Args:
        marks: the matches of the marks in `body`, with the group `key`: a name, or "/" and a name.
        parameters: the schema of the arguments; None: unknown.

    Raises ValueError if a mark has no counterpart, or there is text outside of the marks.
    """
    found, left = iter(marks), 0
    pairs: list[tuple[str, Written]] = []
    for mark in found:
        value, end = _value(mark, found, body, MAX_DEPTH)
        if body[left : mark.start()].strip():
            raise ValueError("there is text outside of the marks")
        pairs, left = [*pairs, (mark["key"], value)], end
    if body[left:].strip():
        raise ValueError("there is text outside of the marks")
    root = parameters if isinstance(parameters, Mapping) else {}
    arguments = _typed(pairs, {"type": "object", **root}, root)
    assert isinstance(arguments, dict)
    return arguments


def _value(opened: Any, marks: Iterator[Any], body: str, depth: int) -> tuple[Written, int]:
    """The value behind an opening mark, and where its closing mark ends."""
    if opened["key"].startswith("/") or not depth:
        raise ValueError("a mark has no counterpart, or values are nested too deeply")
    pairs: list[tuple[str, Written]] = []
    left = opened.end()
    for mark in marks:
        text = body[left : mark.start()]
        if pairs and text.strip():
            raise ValueError("there is text outside of the marks")
        if mark["key"].startswith("/"):  # a model may err in the name
            return pairs or text, mark.end()
        if text.strip():
            raise ValueError("there is text outside of the marks")
        value, left = _value(mark, marks, body, depth - 1)
        pairs.append((mark["key"], value))
    raise ValueError("a value has no end")


def _typed(value: Written, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value of the type that its schema asks for."""
    meant = resolved(schema, root) if isinstance(schema, Mapping) else {}
    types = types_of(meant)
    if isinstance(value, str):
        if not value and "string" not in types and {"array", "object"} & {*types}:
            return [] if "array" in types else {}
        if may_be_text(meant) or value != value.strip():
            return value
        with suppress(ValueError):
            read = msgspec.json.decode(value)
            return value if isinstance(read, str) else read
        return value
    if "object" not in types and all(key == ITEM for key, _ in value):
        return [_typed(each, meant.get("items"), root) for _, each in value]
    if len(dict(value)) < len(value):
        raise ValueError("two values have the same key")
    properties = meant.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {key: _typed(each, known.get(key), root) for key, each in value}
