"""Arguments as Gemma 4 writes them, as grammar rules: JSON without quotes around keys, without spaces, and with a mark
of its own around strings.

Refuses, by name, what it cannot enforce.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from inflight.grammar.marks import pieces_of, quoted, written_mark
from inflight.server.chat_format.rules import ANNOTATIONS, json_rule, target

_ENFORCED = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "minLength"),
    *("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$defs", "definitions"),
}
_ALONE = ("$ref", "enum", "const", "anyOf")
"""Keywords beside which no other would be enforced, but for the type of an enum's values."""
_NUMBERS = ("integer", "number", "boolean", "null")


class BareArguments:
    """Writes the rules of one schema.

    Args:
        rule: the name of the first rule; the others begin with it.
        schema: of an object.
        string_mark: stands before and after each string.
        tokens: the ids of marks that are single tokens to grammars.
    """

    def __init__(self, rule: str, schema: Mapping[str, Any], string_mark: str, tokens: Mapping[str, int]) -> None:
        self._rule, self._root = rule, schema
        self._mark, self._tokens = string_mark, tokens
        self._rules: dict[str, str] = {}
        self._named: dict[str, str] = {}  # rules of references
        self._rules[rule] = self._value(schema)

    def __iter__(self) -> Iterator[str]:
        return (f"{name}: {body}" for name, body in self._rules.items())

    def _new(self, body: str) -> str:
        name = f"{self._rule}_{len(self._rules)}"
        self._rules[name] = body
        return name

    def _value(self, schema: Any) -> str:
        """Return what stands for a value. Raises ValueError if the schema cannot be enforced."""
        if schema is True or schema == {}:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ValueError(f"the schema {schema!r} cannot be enforced in this model's notation of calls")
        for keyword in schema.keys() - _ENFORCED - ANNOTATIONS:
            raise ValueError(f"{keyword!r} cannot be enforced in this model's notation of calls")
        meant = schema.keys() - ANNOTATIONS - {"$defs", "definitions"}
        for alone in _ALONE:
            if alone in meant and len(meant - {"type"}) > 1:
                raise ValueError(
                    f"{alone!r} beside other keywords cannot be enforced in this model's notation of calls"
                )
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "enum" in schema or "const" in schema:
            return self._one_of(self._literal(each) for each in schema.get("enum", [schema.get("const")]))
        if "anyOf" in schema:
            return self._one_of(self._value(each) for each in schema["anyOf"])
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not types:
            return self._anything()
        return self._one_of(self._of_type(each, schema) for each in types)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            item = self._new(self._value(schema.get("items", True)))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "string":
            return self._string(schema.get("minLength", 0), schema.get("maxLength", ""))
        if kind in _NUMBERS:
            bounds = {name: schema[name] for name in schema if name not in ANNOTATIONS | {"$defs", "definitions"}}
            return self._new(json_rule({**bounds, "type": kind}))
        raise ValueError(f"the type {kind!r} is unknown")

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if set(required) - properties.keys():
            raise ValueError("a required property that is not described cannot be enforced in this notation of calls")
        if not properties:
            if schema.get("additionalProperties", True) is False:
                return '"{" "}"'
            if schema.get("additionalProperties", True) not in (True, {}):
                raise ValueError("properties that have no name cannot be enforced in this model's notation of calls")
            pair = self._new(f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self._anything()}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        if schema.get("additionalProperties", True) is not False:
            raise ValueError("properties that have no name cannot be enforced in this model's notation of calls")
        first, rest = "", ""  # what may follow when nothing, or something, was written
        for key, value in reversed(properties.items()):
            if not re.fullmatch(r'[^\s"{}\[\]:,]([^\n"{}\[\]:,]*[^\s"{}\[\]:,])?', key):
                raise ValueError(f"the property {key!r} cannot be written in this model's notation of calls")
            pair = self._new(f"{quoted(f'{key}:')} {self._new(self._value(value))}")
            if key in required:
                first, rest = self._new(f"{pair} {rest}"), self._new(f'"," {pair} {rest}')
            else:
                first = self._new(f"{pair} {rest} | {first}" if first else f"({pair} {rest})?")
                rest = self._new(f'("," {pair})? {rest}')
        return f'"{{" {first} "}}"'

    def _string(self, least: int, most: int | str) -> str:
        text = rf"/(.|\n){{{least},{most}}}/"
        mark = written_mark(self._mark, self._tokens)
        if isinstance(pieces_of(self._mark, self._tokens)[0], int):
            return f"{mark} {self._new(text)} {mark}"
        name = f"{self._rule}_{len(self._rules)}"
        self._rules[f"{name}[lazy]"] = f"{text} {mark}"
        return f"{mark} {name}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            mark = written_mark(self._mark, self._tokens)
            return f"{mark} {quoted(value)} {mark}"
        if isinstance(value, list | dict):
            raise ValueError("an enum of arrays or objects cannot be enforced in this model's notation of calls")
        return quoted(json.dumps(value))

    def _anything(self) -> str:
        if "anything" not in self._named:
            self._named["anything"] = name = f"{self._rule}_any"
            pair = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {name}'
            parts = [self._string(0, ""), *(self._of_type(kind, {}) for kind in _NUMBERS)]
            parts += [f'"[" ({name} ("," {name})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"']
            self._rules[name] = " | ".join(parts)
        return self._named["anything"]

    def _reference(self, reference: str) -> str:
        if reference not in self._named:
            found = target(reference, self._root)
            self._named[reference] = name = f"{self._rule}_ref_{len(self._named)}"
            self._rules[name] = self._value(found)
        return self._named[reference]

    def _one_of(self, parts: Iterator[str]) -> str:
        written = list(parts)
        return written[0] if len(written) == 1 else f"({' | '.join(written)})"
