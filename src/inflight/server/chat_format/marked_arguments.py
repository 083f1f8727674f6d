"""Arguments that are written one by one between marks, as grammar rules: `<parameter=city>Paris</parameter>`.

Decides what stands between the marks: a text as it is, if the schema says that it is a string, and JSON otherwise.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from inflight.grammar.marks import pieces_of, quoted, written_mark
from inflight.server.chat_format.call_format import MarkedArguments
from inflight.server.chat_format.rules import ANNOTATIONS, json_rule, resolved

NOT_IN_TEXTS = ("pattern", "format")
_OF_ROOTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}


def marked_arguments(
    rule: str, schema: Mapping[str, Any], notation: MarkedArguments, tokens: Mapping[str, int]
) -> Iterator[str]:
    """Yield the rules of arguments that follow a schema, in the order in which it names them.

    Args:
        rule: the name of the first rule; the others begin with it.
        tokens: the ids of marks that are single tokens to grammars.

    Raises ValueError if the schema cannot be enforced in this notation.
    """
    schema = {**resolved(schema, schema), **_shared(schema)}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for keyword in sorted(schema.keys() - _OF_ROOTS - ANNOTATIONS):
        raise ValueError(f"{keyword!r} cannot be enforced in this model's notation of calls")
    for key in sorted(set(required) - properties.keys()):
        raise ValueError(f"{key!r} is required, but no property; that cannot be enforced in this model's notation")
    names = [f"{rule}_{number}" for number in range(len(properties))]
    others = f" {rule}_other*" if schema.get("additionalProperties", True) is not False else ""
    if others and (properties or schema.get("additionalProperties", True) not in (True, {})):
        raise ValueError("properties that have no name cannot be enforced in this model's notation of calls")
    written = [f"{name}{'' if key in required else '?'}" for name, key in zip(names, properties, strict=True)]
    yield f"{rule}: {' '.join(written)}{others}"
    before, _, behind = notation.begin.partition("{key}")
    for name, (key, value) in zip(names, properties.items(), strict=True):
        begin = f"{written_mark(before, tokens)} {quoted(key)} {written_mark(behind, tokens)}"
        if value is True:
            value = {}
        elif not isinstance(value, Mapping):
            raise ValueError(f"the schema {value!r} of {key!r} cannot be enforced in this model's notation of calls")
        yield from _value(name, begin, key, {**value, **_shared(schema)}, notation.end, tokens)
    if others:
        begin = f"{written_mark(before, tokens)} /[A-Za-z_][A-Za-z0-9_.-]*/ {written_mark(behind, tokens)}"
        yield from _value(f"{rule}_other", begin, "", {"type": "string"}, notation.end, tokens)


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What the schema of each value needs of the whole."""
    return {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}


def _value(
    rule: str, begin: str, key: str, schema: Mapping[str, Any], end: str, tokens: Mapping[str, int]
) -> Iterator[str]:
    meant = resolved(schema, schema)
    choices = meant.get("enum", [meant["const"]] if "const" in meant else [])
    if "enum" in meant and not choices:
        raise ValueError(f"the enum of {key!r} has no values")
    if choices and all(isinstance(each, str) for each in choices):
        yield f"{rule}: {begin} ({' | '.join(map(quoted, choices))}) {written_mark(end, tokens)}"
    elif not _is_text(meant):
        yield f"{rule}: {begin} {rule}_json {written_mark(end, tokens)}"
        yield f"{rule}_json: {json_rule(schema)}"
    else:
        for name in NOT_IN_TEXTS:
            if name in meant:
                raise ValueError(f"{name!r} of {key!r} cannot be enforced in this model's notation of calls")
        text = rf"/(.|\n){{{meant.get('minLength', 0)},{meant.get('maxLength', '')}}}/"
        if isinstance(pieces_of(end, tokens)[0], int):
            yield f"{rule}: {begin} {rule}_text {written_mark(end, tokens)}"
            yield f"{rule}_text: {text}"
        else:
            yield f"{rule}: {begin} {rule}_text"
            yield f"{rule}_text[lazy]: {text} {quoted(end)}"


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be a string; then it is one, whatever else it may be."""
    types = schema.get("type", ())
    return "string" in ([types] if isinstance(types, str) else types) or any(
        isinstance(each, Mapping) and _is_text(each) for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    )
