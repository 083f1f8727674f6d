"""Refusals and their messages, caching, and use from many threads."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.structured_output import MAX_CHARACTERS, StructuredOutput
from inflight.grammar import compiler as compiler_module
from inflight.grammar.json_schema import checked_schema
from tests.grammar.helpers import TOKENIZERS, allowed, compiler, matcher, spelled, write

BYTE_LEVEL = TOKENIZERS["byte_level"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, r"exactly one of json_schema, json_object, regex, choice, grammar; none is given"),
        ({"regex": "a", "json_object": True}, r"json_object and regex are given"),
        ({"json_object": 1}, r"json_object is 1; it must be True or False"),
        ({"json_schema": {"type": "object"}}, r"json_schema is \{'type': 'object'\}; it must be text"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, r"regex has 262145 characters; at most 262144 are accepted"),
        ({"choice": ()}, r"choice is \(\); it must be a list of at least one string"),
        ({"choice": "abc"}, r"choice is 'abc'; it must be a list"),
        ({"choice": ("a", 1)}, r"a member of choice is 1; it must be a string"),
        ({"choice": ("\ud800",)}, r"half of a surrogate pair"),
        ({"choice": ("a" * 200_000, "b" * 200_000)}, r"choice has more than 262144 characters"),
        ({"jsonschema": "{}"}, r"no option 'jsonschema'; did you mean 'json_schema'\?"),
    ],
)
def test_invalid_requests_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(**asked)


def test_a_structured_output_survives_serialisation() -> None:
    for asked in (
        StructuredOutput(choice=["a", "ü"]),
        StructuredOutput(json_schema="{}"),
        StructuredOutput(grammar="x"),
    ):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=StructuredOutput)
        assert (sent, hash(sent), sent.kind) == (asked, hash(asked), asked.kind)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, r"has 'not' at #, which cannot be enforced; leave it out"),
        ({"properties": {"a": {"items": [{"uniqueItems": True}]}}}, r"'uniqueItems' at #/properties/a/items/0"),
        ({"$defs": {"x": {"anyOf": [{"if": True}]}}}, r"'if' at #/\$defs/x/anyOf/0"),
        ({"additionalProperties": {"contains": {}}}, r"'contains' at #/additionalProperties"),
        (
            {"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
            r"'unevaluatedProperties' at #, which",
        ),
        ({"type": "object", "propertyNames": {"format": "date"}}, r"'propertyNames' at #, which cannot be enforced"),
        ({"propertyNames": {"format": "uuid", "pattern": "^[a-z0-9-]+$"}}, r"'propertyNames' at #, which cannot"),
        ({"propertyNames": {"format": "email", "pattern": "^a"}}, r"'propertyNames' at #, which cannot be enforced"),
        ({"propertyNames": {"propertyNames": {"$ref": "#"}}}, r"'propertyNames' at #, which cannot be enforced"),
        ({"properties": {"a": {"$id": "a", "$dynamicRef": "#b"}}}, r"'\$dynamicRef' at #/properties/a, which cannot"),
        ({"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, r"'propertyNames' at #"),
        ({"x-guidance": {"lenient": True}}, r"'x-guidance' at #"),
        ({"type": "string", "min_length": 3}, r"has 'min_length' at #; did you mean 'minLength'\?"),
        ({"patternProperties": {"^a$": {}}, "minProperties": 2}, r"minProperties 2 at #, which cannot be enforced"),
        (
            {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
            r"exclusiveMinimum 0 and maximum 0.5, which cannot be enforced together",
        ),
        ({"exclusiveMaximum": -1.0, "minimum": -1.25}, r"exclusiveMaximum -1 and minimum -1.25, which cannot be"),
        ({"type": "string", "format": "zork"}, r"Unknown format: zork"),
        ({"type": "strin"}, r"Invalid type: strin"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"$ref": "http://example.com/x.json"}, r"example.com/x.json"),
        ({"$ref": "#/$defs/absent"}, r"/\$defs/absent"),
        (
            {"properties": {"a": {"pattern": "(?=a)b"}}},
            r"the pattern '\(\?=a\)b' at #/properties/a, which cannot be enforced; write it without look-around",
        ),
        ({"pattern": "^(?=a)(b|c)|[(]"}, r"the pattern '\^\(\?=a\)\(b\|c\)\|\[\(\]' at #, which cannot be enforced"),
        ({"pattern": "^" + "(?=a)" * 1000 + "a"}, r"the pattern .* at #, which cannot be enforced"),
        ({"pattern": "^(?=a)?b"}, r"the pattern '\^\(\?=a\)\?b' at #, which cannot be enforced"),
        ({"pattern": "^(?=a)a|b"}, r"the pattern '\^\(\?=a\)a\|b' at #, which cannot be enforced"),
        ({"unevaluatedProperties": False, "properties": 5}, r"'unevaluatedProperties' at #"),
        ({"type": "string", "pattern": "("}, r"unclosed group"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"oneOf is accepted only where .*anyOf"),
        (False, r"json_schema is false; it must be a JSON object"),
        ([], r"json_schema is \[\]; it must be a JSON object"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        matcher(BYTE_LEVEL, json_schema=json.dumps(schema))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"type": NaN}', "", '{"a":' * 50_000, "[" * 200_000])
def test_a_schema_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"json_schema is not JSON: .+"):
        matcher(BYTE_LEVEL, json_schema=text)


ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
ZOD_UUID_4 = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "string", "nullable": True, "maxLength": 2}, {'"ab"': True, "null": True, '"abc"': False}),
        ({"type": ["null", "integer"], "nullable": True}, {"null": True, "3": True, '"3"': False}),
        ({"type": "integer", "nullable": False}, {"null": False, "3": True}),
        ({"propertyNames": True, "type": "object"}, {"{}": True, '{"a": 1}': True}),
        ({"propertyNames": {"type": "string"}, "properties": {"a": {}}}, {'{"a": 1}': True, '{"b": 1}': False}),
        (
            {"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}, "type": "object"},
            {'{"ab": 1}': True, '{"ad": 1}': False, '{"ab": "x"}': False},
        ),
        (
            {"propertyNames": {"type": "string", "minLength": 2, "maxLength": 3}, "type": "object"},
            {'{"ab": 1}': True, '{"a": 1}': False, '{"abcd": 1}': False},
        ),
        (
            {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "boolean"}, "type": "object"},
            {'{"y": true}': True, '{"z": true}': False, '{"x": 1}': False},
        ),
        (
            {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
            {'"a.b@c.de"': True, '"a..b@c.de"': False, '".a@c.de"': False, '"a@c..de"': False},
        ),
        ({"pattern": PYDANTIC_DECIMAL}, {'"-1.5"': True, '".5"': True, '"-."': False, '""': False}),
        (
            {"pattern": ZOD_DURATION, "format": "duration"},
            {'"P1DT2H"': True, '"P2W"': True, '"P"': False, '"P1DT"': False},
        ),
        (
            {"type": "string", "pattern": r"^(?=.*\d)(?=.{3,5}$)([a-z]|\d)+$"},
            {'"ab1"': True, '"abc"': False, '"a1"': False, '"abcde1"': False},
        ),
        ({"type": "string", "format": "cuid", "pattern": "^c[a-z]+$"}, {'"cab"': True, '"ab"': False}),
        ({"type": "string", "format": "binary"}, {'"ab"': True, "5": False}),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5}, {"3": False, "4": True, "5": True}),
        ({"type": "integer", "maximum": 5, "exclusiveMaximum": False}, {"5": True, "6": False}),
        (
            {
                "propertyNames": {"$ref": "#/$defs/Color"},
                "additionalProperties": {"type": "integer"},
                "type": "object",
                "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
            },
            {'{"red": 1}': True, '{"green": 1}': False, '{"red": "a"}': False},
        ),
        (
            {"propertyNames": {"format": "uuid"}, "type": "object", "additionalProperties": {"type": "null"}},
            {'{"123e4567-e89b-12d3-a456-426614174000": null}': True, '{"a": null}': False},
        ),
        (
            {"propertyNames": {"format": "uuid", "pattern": ZOD_UUID}, "type": "object"},
            {'{"123e4567-e89b-12d3-a456-426614174000": 1}': True, '{"123e4567-e89b-02d3-a456-426614174000": 1}': False},
        ),
        (
            {"propertyNames": {"format": "uuid", "pattern": ZOD_UUID_4}, "type": "object"},
            {'{"123e4567-e89b-42d3-a456-426614174000": 1}': True, '{"123e4567-e89b-12d3-a456-426614174000": 1}': False},
        ),
        (
            {"propertyNames": {"format": "cuid", "pattern": "^c"}, "type": "object"},
            {'{"c": 1}': True, '{"a": 1}': False},
        ),
        (
            {
                "$dynamicAnchor": "node",
                "type": "object",
                "properties": {"next": {"$dynamicRef": "#node"}},
                "additionalProperties": False,
            },
            {'{"next": {"next": {}}}': True, '{"next": 5}': False},
        ),
        (
            {
                "$recursiveAnchor": True,
                "type": "object",
                "properties": {"next": {"$recursiveRef": "#"}},
                "additionalProperties": False,
            },
            {'{"next": {"next": {}}}': True, '{"next": 5}': False},
        ),
        (
            {
                "type": "object",
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}}],
                "properties": {"c": {"type": "integer"}},
                "unevaluatedProperties": False,
                "$defs": {
                    "A": {"$defs": {"deep": {"type": "boolean"}}, "properties": {"a": {"$ref": "#/$defs/A/$defs/deep"}}}
                },
            },
            {'{"a": true}': True, '{"b": 1}': True, '{"c": 1}': True, '{"a": 1}': False, '{"d": 1}': False},
        ),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": {"type": "integer"}},
            {'{"a": "x"}': True, '{"b": 1}': True, '{"b": "x"}': False},
        ),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": True}, {'{"b": 1}': True}),
    ],
)
def test_what_can_be_said_otherwise_is_enforced(schema: object, texts: dict[str, bool]) -> None:
    start = matcher(BYTE_LEVEL, json_schema=json.dumps(schema))
    for text, is_valid in texts.items():
        here = start.clone()
        assert (write(here, BYTE_LEVEL, text) == len(text) and here.may_stop) == is_valid, text


@settings(max_examples=500)
@given(st.text("aZ0.'+-@_", max_size=12), st.text("PTWDHMS1.,", max_size=9), st.text("+-.01", max_size=6))
def test_patterns_of_frameworks_are_replaced_by_ones_for_the_same_texts(text: str, time: str, number: str) -> None:
    for pattern, texts in (
        (ZOD_EMAIL, (text, f"a{text}@a.aZ", f"a@{text}.aZ")),
        (ZOD_DURATION, (time, f"P{time}", f"P1D{time}", f"PT{time}", f"P1YT1H{time}")),
        (PYDANTIC_DECIMAL, (number,)),
    ):
        replaced = checked_schema(json.dumps({"pattern": pattern}))["pattern"]
        assert "(?!" not in replaced
        for each in texts:
            assert bool(re.search(pattern, each)) == bool(re.search(replaced, each))


def test_annotations_in_a_schema_are_accepted() -> None:
    remarks = {
        "title": "t",
        "description": "d",
        "examples": [{"not": 1}],
        "default": {"if": 1},
        "x-order": 3,
        "zork": 1,
    }
    here = matcher(BYTE_LEVEL, json_schema=json.dumps({**remarks, "properties": {"not": {"const": {"then": 1}}}}))
    assert write(here, BYTE_LEVEL, '{"not": {"then": 1}') == 19


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "a("}, r"^regex cannot be enforced: invalid regex.*unclosed group"),
        ({"regex": r"\bfoo"}, r"^regex cannot be enforced: .*lookarounds not supported"),
        ({"regex": r"(a)\1"}, r"^regex cannot be enforced: .*backreferences"),
        ({"regex": r"[^\s\S]"}, r"^regex cannot be enforced"),
        ({"grammar": "start: foo"}, r'^grammar cannot be enforced: .*unknown name: "foo"'),
        ({"grammar": 'start: "a'}, r"^grammar cannot be enforced: "),
        ({"grammar": "root ::= ["}, r"^the grammar cannot be read: "),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, r"^the grammar cannot be read: .*recursion"),
        ({"grammar": "start: start"}, r"^grammar cannot be enforced: "),
        ({"grammar": 'start: %json {"not": {}}'}, r"Unimplemented keys"),
        ({"grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, r"Unimplemented keys"),
        ({"regex": "(" * 20_000 + ")" * 20_000}, r"^regex cannot be enforced: "),
    ],
)
def test_grammars_that_cannot_be_enforced_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        matcher(BYTE_LEVEL, **asked)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def nested(depth: int) -> str:
    return '{"properties": {"a": ' * depth + "true" + "}}" * depth


def properties(count: int, **more: object) -> dict[str, object]:
    return {"properties": {f"p{number}": {} for number in range(count)}, **more}


SEVERAL_OBJECTS = {"properties": {f"p{number}": properties(99) for number in range(60)}}
ALTERNATIVES = {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(9)]} for i in range(9)]}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": nested(300)}, "recursion limit"),
        ({"json_schema": json.dumps({"type": "integer", "multipleOf": 999_999_937})}, "fuel exhausted"),
        ({"json_schema": json.dumps(ALTERNATIVES)}, "schema too large"),
        ({"json_schema": json.dumps({"items": properties(401)})}, "401 properties at #/items that are not required"),
        ({"json_schema": json.dumps(SEVERAL_OBJECTS)}, "json_schema is too large: at most 5000 schemas"),
        (
            {"json_schema": json.dumps({"patternProperties": {f"^{number}x": {} for number in range(101)}})},
            "100 patternProperties",
        ),
        ({"grammar": "start: " + '"a" ' * 20_000}, "has 80007 characters; at most 65536"),
        ({"grammar": "root ::= " + '"a" ' * 3_000}, "has 12009 characters; at most 8192"),
    ],
)
def test_grammars_that_would_cost_too_much_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        matcher(BYTE_LEVEL, **asked)


def test_long_grammars_are_accepted() -> None:
    required = [f"p{number}" for number in range(1000)]
    matcher(BYTE_LEVEL, json_schema=json.dumps(properties(1000, required=required)))
    matcher(BYTE_LEVEL, json_schema=json.dumps(properties(400)))
    matcher(BYTE_LEVEL, choice=[f"choice number {number}" for number in range(5000)])


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(4000)) + 'a4000: "c"'},
        {
            "json_schema": json.dumps(
                {
                    "$ref": "#/$defs/0",
                    "$defs": {f"{n}": {"properties": {"x": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(2000)}
                    | {"2000": {"type": "integer"}},
                }
            )
        },
    ],
    ids=["rules", "references"],
)
def test_long_chains_of_references_are_compiled(asked: dict[str, Any]) -> None:
    """Thousands of references would overflow an ordinary stack and end the process."""
    assert allowed(matcher(BYTE_LEVEL, **asked), BYTE_LEVEL)


def test_compilation_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = compiler_module.checked_schema
    monkeypatch.setattr(compiler_module, "checked_schema", lambda text, **_: go_on.wait() and original(text))
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(compiler_module, "MAX_LATE", 1)
    made = compiler(BYTE_LEVEL)
    with pytest.raises(InvalidRequestError, match=r"takes more than 0.01 s to compile"):
        made.compile(StructuredOutput(json_object=True))
    with pytest.raises(InvalidRequestError, match=r"slow structured outputs are being compiled; try again later"):
        made.compile(StructuredOutput(regex="a"))
    go_on.set()
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", 60)
    for thread in [each for each in threading.enumerate() if each.name == "inflight-grammar"]:
        thread.join()
    assert allowed(made.compile(StructuredOutput(json_object=True)), BYTE_LEVEL) == spelled(BYTE_LEVEL, "{")


def test_compiled_grammars_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work shows it: the schema is not examined again."""
    looked_at: list[str] = []
    original = compiler_module.checked_schema
    monkeypatch.setattr(compiler_module, "checked_schema", lambda text, **_: looked_at.append(text) or original(text))
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    one, other, third = (json.dumps({"const": name}) for name in "abc")
    made = compiler(BYTE_LEVEL)
    first = made.compile(StructuredOutput(json_schema=one))
    assert write(first, BYTE_LEVEL, '"a"') == 3
    again = made.compile(StructuredOutput(json_schema=one))
    assert allowed(again, BYTE_LEVEL) == spelled(BYTE_LEVEL, '"'), "at its beginning, whatever the first one did"
    made.compile(StructuredOutput(json_schema=other))
    made.compile(StructuredOutput(json_schema=one))
    made.compile(StructuredOutput(json_schema=third))  # now `other` is the least recently used
    made.compile(StructuredOutput(json_schema=one))
    assert looked_at == [one, other, third]
    made.compile(StructuredOutput(json_schema=other))
    assert looked_at[-1] == other
    monkeypatch.setattr(compiler_module, "MAX_KEPT_CHARACTERS", 20)
    made.compile(StructuredOutput(json_schema=third))
    assert len(looked_at) == 5


def test_many_threads_can_compile() -> None:
    made = compiler(BYTE_LEVEL)

    def work(number: int) -> int:
        here = made.compile(StructuredOutput(choice=(f"number {number % 5}",)))
        return write(here, BYTE_LEVEL, f"number {number % 5}")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(200))) == {8}


def test_errors_of_regexes_point_at_the_regex() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        matcher(BYTE_LEVEL, regex="ab(")
    assert not re.search(r"\d\(\d", str(caught.value)), "no place in text that its author never wrote"
