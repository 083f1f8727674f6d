"""The grammar (Lark's notation) of valid tool calls in a family's notation.

It fixes calls to the character, by which readers recognise them. Markers that are single tokens are given by id,
because in a grammar their text would match other tokens.

Arguments are plain JSON, or written in one of two other notations. `marked_arguments`: one by one between marks,
`<parameter=city>Paris</parameter>`: a text as it is if the schema says that it is one, else JSON. `BareArguments`: as
Gemma 4 writes them, JSON without quotes around keys, without spaces, and with a mark of its own around strings. Both
refuse, by name, what they cannot enforce.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from inflight.contracts.api.structured_output import StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import pieces_of, quoted, written_mark
from inflight.server.chat_format.families import ITEM, BareJson, CallFormat, KeywordArguments, MarkedArguments, head_of

Schema: TypeAlias = Mapping[str, Any]
"""A checked schema, enforceable as far as checked."""

NOT_ENFORCED = "cannot be enforced in this model's notation of calls"

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "readOnly"),
        "x-guidance",
    }
)
"""Keywords without effect on validity (or, the last, only on JSON's white space)."""

_ENFORCED = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "minLength"),
    *("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$defs", "definitions"),
}
_ALONE = ("$ref", "enum", "const", "anyOf")
"""Keywords beside which no other is enforced, except an enum's type."""
_NUMBERS = ("integer", "number", "boolean", "null")
NOT_IN_TEXTS = ("pattern", "format")
OTHER = "argument"
"""Stands for a name that is not known, where a mark repeats it; readers ignore which it is."""
_MOST_NESTED = 8
"""Most objects and arrays around a value between marks."""
_OF_ROOTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}


def schema_of(parameters: Mapping[str, Any] | None) -> Schema:
    """Return the schema of a tool's arguments; without a type, an object's.

    Raises ValueError if its type is not an object's, or it cannot be enforced."""
    if parameters is None:
        return checked_schema('{"type": "object", "additionalProperties": false}')
    schema = {"type": "object", **parameters}
    if schema["type"] != "object":
        raise ValueError(f"the type of its parameters is {schema['type']!r}; arguments must be an 'object'")
    return checked_schema(json.dumps(schema))


def calls_grammar(
    call_format: CallFormat,
    schemas: Mapping[str, Schema],
    tokens: Mapping[str, int],
    *,
    is_required: bool,
    is_parallel: bool,
    content_schema: Schema | None = None,
    content_begin: str = "",
) -> StructuredOutput:
    """Return the grammar of calls or, if no call is required, of content: JSON of a schema, or free text up to a call.

    Args:
        schemas: the schema of each tool's arguments, by the tool's name.
        tokens: the ids of markers that are single tokens to grammars.
        is_required: whether there must be a call.
        is_parallel: whether there may be several calls.
        content_schema: the schema of content that is not a call; None: free text.
        content_begin: the mark before content.

    Raises ValueError if the grammar is too large.
    """
    # A model that may omit the marker is never forced to write it.
    begin = "" if call_format.is_begin_optional else written_mark(call_format.begin, tokens)
    group = f"{begin} calls"
    may_repeat = call_format.between_objects is None and call_format.between_groups is not None
    is_repeated = is_parallel and may_repeat and not call_format.is_begin_optional
    groups = f"{group} ({quoted(call_format.between_groups or '')} {group})*" if is_repeated else group
    content = written_mark(content_begin, tokens)
    if is_required:
        first = [f"start: {groups}"]
    elif content_schema is not None:
        first = [f"start: {content} content | {groups}", f"content: {json_rule(content_schema)}"]
    elif content:
        first = [f"start: {content} (TEXT | <[*]>)* | {groups}", r"TEXT: /(.|\n)*/"]
    elif not begin:
        first = ["start: TEXT | calls", r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"]
    else:
        first = _free_text(call_format.begin, tokens, "+" if is_repeated else "")
    return StructuredOutput(grammar="\n".join([*first, *_calls(call_format, schemas, tokens, is_parallel), ""]))


def _free_text(begin: str, tokens: Mapping[str, int], repeated: str) -> list[str]:
    """Return rules for any text up to a marker. If the marker begins with a token, the text may contain any other token
    (such as those around reasoning)."""
    before, token, mark = _at_token(begin, tokens)
    if token is None:
        rules = [f"start: TEXT | (opener calls){repeated}", f"opener[lazy]: TEXT {quoted(before)}"]
    elif before:
        rules = [f"start: TEXT | (opener calls){repeated}", f"opener: OPENER {mark}", f"OPENER: TEXT {quoted(before)}"]
    else:
        rules = [f"start: text | (opener calls){repeated}", f"opener: text {mark}", f"text: (TEXT | <[^{token}]>)*"]
    return [*rules, r"TEXT: /(.|\n)*/"]


def _at_token(mark: str, tokens: Mapping[str, int]) -> tuple[str, int | None, str]:
    """Divide a mark at its first single token: the text before it, its id (None: there is none), and the rest from it
    on, written for grammars."""
    pieces = pieces_of(mark, tokens)
    before = pieces[0] if isinstance(pieces[0], str) else ""
    token = next((piece for piece in pieces if isinstance(piece, int)), None)
    return before, token, written_mark(mark[len(before) :], tokens)


def _calls(
    call_format: CallFormat, schemas: Mapping[str, Schema], tokens: Mapping[str, int], is_parallel: bool
) -> list[str]:
    """Return the rules for what follows a marker."""
    calls = "call"
    if is_parallel and call_format.between_objects is not None:
        calls = f"call ({quoted(call_format.between_objects)} call)*"
    opening, closing = written_mark(call_format.opening, tokens), written_mark(call_format.closing, tokens)
    end = written_mark(call_format.end, tokens)
    rules = [
        f"calls: {opening} {calls} {closing} {end}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}",
    ]
    for number, (name, schema) in enumerate(schemas.items()):
        head, tail = quoted(head_of(call_format, name)), '"}"'
        if call_format.head:
            head, tail = (_placed(each, name, tokens) for each in (call_format.head, call_format.tail))
        rules.append(f"call_{number}: {head} arguments_{number} {tail}")
        rules += _arguments(f"arguments_{number}", call_format, schema, tokens)
    return rules


def _placed(text: str, name: str, tokens: Mapping[str, int]) -> str:
    """Return what stands for a text with places, see `CallFormat.head`."""
    places = {"{name}": quoted(name), "{index}": "/[0-9]{1,6}/", "{id}": "/[A-Za-z0-9_]{1,64}/"}
    pieces = re.split("(" + "|".join(map(re.escape, places)) + ")", text)
    return " ".join(places.get(piece) or written_mark(piece, tokens) for piece in pieces)


def _arguments(rule: str, call_format: CallFormat, schema: Schema, tokens: Mapping[str, int]) -> Iterable[str]:
    match call_format.arguments:
        case MarkedArguments():
            return marked_arguments(rule, schema, call_format.arguments, tokens)
        case KeywordArguments():
            return keyword_arguments(rule, schema)
        case BareJson():
            return BareArguments(rule, schema, call_format.arguments.string_mark, tokens)
        case None:
            return [f"{rule}: {json_rule(schema)}"]


# ------------------------------------------------------------------------------------- arguments


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return what stands for JSON of a schema."""
    # "::=" would be taken to mean that the grammar is in another notation.
    return "%json " + json.dumps(schema, ensure_ascii=False).replace("::=", ":\\u003a=")


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's references within `root`, such as "#/$defs/city". Raises ValueError."""
    seen = set()
    while "$ref" in schema:
        if schema["$ref"] in seen or not schema["$ref"].startswith("#"):
            raise ValueError(f"the reference {schema['$ref']!r} cannot be followed")
        seen.add(schema["$ref"])
        found = target(schema["$ref"], root)
        if not isinstance(found, Mapping):
            raise ValueError(f"the reference {schema['$ref']!r} leads to {found!r}, which is not an object's schema")
        schema = found
    return schema


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema within `root` to which a reference leads; "#" is the root. Raises ValueError."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None or not (reference == "#" or reference.startswith("#/")):
        raise ValueError(f"the reference {reference!r} leads nowhere")
    return found


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
    properties, required, may_have_others = _properties_of(schema)
    names = [f"{rule}_{number}" for number in range(len(properties))]
    others = f" {rule}_other*" if may_have_others else ""
    written = [f"{name}{'' if key in required else '?'}" for name, key in zip(names, properties, strict=True)]
    yield f"{rule}: {' '.join(written)}{others}"
    before, _, behind = notation.begin.partition("{key}")
    other = notation.begin_other.partition("{key}")[2]
    for name, (key, value) in zip(names, properties.items(), strict=True):
        begin = f"{written_mark(before, tokens)} {quoted(key)} {written_mark(behind, tokens)}"
        if value is True:
            value = {}
        elif not isinstance(value, Mapping):
            raise ValueError(f"the schema {value!r} of {key!r} {NOT_ENFORCED}")
        value = {**value, **_shared(schema)}
        meant = resolved(value, value)
        if notation.begin_other and not (may_be_text(meant) or any(isinstance(each, str) for each in _choices(meant))):
            begin = f"{written_mark(before, tokens)} {quoted(key)} {written_mark(other, tokens)}"
        yield from _value(name, begin, key, value, notation, tokens)
    if others:
        begin = f"{written_mark(before, tokens)} /[A-Za-z_][A-Za-z0-9_.-]*/ {written_mark(behind, tokens)}"
        yield from _value(f"{rule}_other", begin, OTHER, {"type": "string"}, notation, tokens)


def _properties_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str], bool]:
    """The properties of arguments that are written one by one, the required ones, and whether any others may come.

    Raises ValueError if the schema says more."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for keyword in sorted(schema.keys() - _OF_ROOTS - ANNOTATIONS):
        raise ValueError(f"{keyword!r} {NOT_ENFORCED}")
    for key in sorted(set(required) - properties.keys()):
        raise ValueError(f"{key!r} is required, but no property; that {NOT_ENFORCED}")
    others = schema.get("additionalProperties", True)
    if others is not False and (properties or others not in (True, {})):
        raise ValueError(f"properties that have no name {NOT_ENFORCED}")
    return properties, required, others is not False


def keyword_arguments(rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of arguments as in Python, with JSON's literals. See `marked_arguments`."""
    schema = {**resolved(schema, schema), **_shared(schema)}
    properties, required, may_have_others = _properties_of(schema)
    if may_have_others:
        yield f"{rule}: ({rule}_other ({quoted(', ')} {rule}_other)*)?"
        yield f"{rule}_other: /[A-Za-z_][A-Za-z0-9_]*/ {quoted('=')} {json_rule({})}"
        return
    yield f"{rule}: {rule}_first_0"  # the first argument stands behind no comma
    for number, (key, value) in enumerate(properties.items()):
        if not re.fullmatch(r"[\w.-]+", key):
            raise ValueError(f"the property {key!r} cannot be written in this model's notation of calls")
        if value is not True and not isinstance(value, Mapping):
            raise ValueError(f"the schema {value!r} of {key!r} {NOT_ENFORCED}")
        meant = {**({} if value is True else value), **_shared(schema)}
        yield f"{rule}_{number}: {quoted(f'{key}=')} {json_rule(meant)}"
        is_needed = key in required
        yield f"{rule}_first_{number}: {rule}_{number} {rule}_next_{number + 1}" + (
            "" if is_needed else f" | {rule}_first_{number + 1}"
        )
        yield f"{rule}_next_{number}: {quoted(', ')} {rule}_{number} {rule}_next_{number + 1}" + (
            "" if is_needed else f" | {rule}_next_{number + 1}"
        )
    yield f'{rule}_first_{len(properties)}: ""'
    yield f'{rule}_next_{len(properties)}: ""'


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the whole schema that each value's schema needs."""
    return {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}


def _value(
    rule: str, begin: str, key: str, schema: Mapping[str, Any], notation: MarkedArguments, tokens: Mapping[str, int]
) -> Iterator[str]:
    meant, end = resolved(schema, schema), notation.end.replace("{key}", key)
    choices, types = _choices(meant), types_of(meant)
    is_text = may_be_text(meant) or (notation.is_nested and not types and not choices)
    if "enum" in meant and not choices:
        raise ValueError(f"the enum of {key!r} has no values")
    if choices and all(isinstance(each, str) for each in choices):
        yield f"{rule}: {begin} ({' | '.join(map(quoted, choices))}) {written_mark(end, tokens)}"
    elif notation.is_nested and not is_text and {"array", "object"} & {*types}:
        if rule.count("_in") >= _MOST_NESTED:
            raise ValueError(f"the depth of {key!r} {NOT_ENFORCED}")
        yield f"{rule}: {begin} {rule}_in{'*' if types == ('array',) else ''} {written_mark(end, tokens)}"
        if types == ("object",):
            yield from marked_arguments(f"{rule}_in", {**meant, **_shared(schema)}, notation, tokens)
        elif types == ("array",) and meant.keys() <= {"type", "items", *ANNOTATIONS, *_shared(schema)}:
            mark = written_mark(notation.begin.replace("{key}", ITEM), tokens)
            yield from _value(f"{rule}_in", mark, ITEM, {**meant.get("items", {}), **_shared(schema)}, notation, tokens)
        else:
            raise ValueError(f"the schema of {key!r} {NOT_ENFORCED}")
    elif not is_text:
        yield f"{rule}: {begin} {rule}_json {written_mark(end, tokens)}"
        yield f"{rule}_json: {json_rule(schema)}"
    else:
        for name in NOT_IN_TEXTS:
            if name in meant:
                raise ValueError(f"{name!r} of {key!r} {NOT_ENFORCED}")
        text = rf"/(.|\n){{{meant.get('minLength', 0)},{meant.get('maxLength', '')}}}/"
        before, token, mark = _at_token(end, tokens)
        if token is not None:  # no text contains it
            yield f"{rule}: {begin} {rule.upper()} {mark}"
            yield f"{rule.upper()}: {text} {quoted(before)}"
        else:
            yield f"{rule}: {begin} {rule}_text"
            yield f"{rule}_text[lazy]: {text} {quoted(end)}"


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a schema names; []: any."""
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names, itself or in alternatives; (): any."""
    types = schema.get("type", ())
    choices = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    inner = (each for choice in choices if isinstance(choice, Mapping) for each in types_of(choice))
    return (*([types] if isinstance(types, str) else types), *inner)


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be a string; then it is one, whatever else it may be."""
    return "string" in types_of(schema)


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
            raise ValueError(f"the schema {schema!r} {NOT_ENFORCED}")
        for keyword in schema.keys() - _ENFORCED - ANNOTATIONS:
            raise ValueError(f"{keyword!r} {NOT_ENFORCED}")
        meant = schema.keys() - ANNOTATIONS - {"$defs", "definitions"}
        for alone in _ALONE:
            if alone in meant and len(meant - {"type"}) > 1:
                raise ValueError(f"{alone!r} beside other keywords {NOT_ENFORCED}")
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
            raise ValueError(f"a required property that is not described {NOT_ENFORCED}")
        if not properties:
            if schema.get("additionalProperties", True) is False:
                return '"{" "}"'
            if schema.get("additionalProperties", True) not in (True, {}):
                raise ValueError(f"properties that have no name {NOT_ENFORCED}")
            pair = self._new(f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self._anything()}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        if schema.get("additionalProperties", True) is not False:
            raise ValueError(f"properties that have no name {NOT_ENFORCED}")
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
            raise ValueError(f"an enum of arrays or objects {NOT_ENFORCED}")
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
