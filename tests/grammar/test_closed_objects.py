"""Objects have only the properties that they name, wherever that can be meant, and any by the exact reading."""

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from inflight.grammar.json_schema import close_objects
from tests.grammar.helpers import TOKENIZERS, matcher, spelled, write

BYTE_LEVEL = TOKENIZERS["byte_level"]
A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
REF: dict[str, Any] = {"$ref": "#/$defs/A"}


class Leaf(BaseModel):
    size: int


class Tree(BaseModel):
    leaves: list[Leaf]
    best: Leaf | None = None
    children: "list[Tree]" = []


def accepts(schema: dict[str, Any], text: str, *, exact: bool = False) -> bool:
    here = matcher(BYTE_LEVEL, json_schema=json.dumps(schema), exact_schema=exact)
    return write(here, BYTE_LEVEL, text) == len(spelled(BYTE_LEVEL, text)) and here.may_stop


def test_a_pydantic_model_has_only_its_fields() -> None:
    schema = Tree.model_json_schema()
    for text, is_closed in (
        ('{"leaves": [{"size": 1}], "best": {"size": 2}, "children": [{"leaves": []}]}', True),
        ('{"leaves": [], "more": 1}', False),
        ('{"leaves": [{"size": 1, "more": 1}]}', False),
        ('{"leaves": [], "best": {"size": 1, "more": 1}}', False),
        ('{"leaves": [], "best": null, "children": [{"leaves": [], "more": 1}]}', False),
    ):
        assert accepts(schema, text) is is_closed, text
        assert accepts(schema, text, exact=True), text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x": 1}'),
        ({**A, "type": "object", "additionalProperties": True}, '{"x": 1}'),
        ({**A, "type": "object", "additionalProperties": {"type": "integer"}}, '{"x": 1}'),
        ({"type": "object", **A, "required": ["b"]}, '{"b": 1}'),
        ({"type": "object", "allOf": [A, B]}, '{"a": 1, "b": 2}'),
        ({"type": "object", "$defs": {"A": A}, "allOf": [REF, B]}, '{"a": 1, "b": 2}'),
        ({"type": "object", **B, "$defs": {"A": A}, "allOf": [REF]}, '{"b": 1, "a": 2}'),
        ({"type": "object", **B, "anyOf": [A, {"required": ["b"]}]}, '{"b": 1, "a": 2}'),
    ],
)
def test_objects_that_may_have_more_stay_open(schema: dict[str, Any], text: str) -> None:
    assert accepts(schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", **A}, '{"x": 1}'),
        ({"type": "object", **A, "patternProperties": {"^n": {}}}, '{"x": 1}'),
        ({"$defs": {"A": {"type": "object", **A}}, "allOf": [REF]}, '{"x": 1}'),
        ({"anyOf": [{"type": "object", **A}, {"type": "object", **B}]}, '{"x": 1}'),
        ({"type": "array", "items": {"type": "object", **A}}, '[{"x": 1}]'),
        ({"type": "array", "prefixItems": [{"type": "object", **A}]}, '[{"x": 1}]'),
        ({"additionalProperties": {"type": "object", **A}, "type": "object"}, '{"y": {"x": 1}}'),
    ],
)
def test_objects_that_name_their_properties_have_no_others(schema: dict[str, Any], text: str) -> None:
    assert not accepts(schema, text)
    assert accepts(schema, text, exact=True)


def test_a_closed_schema_is_never_wider_and_stays_satisfiable() -> None:
    schema: dict[str, Any] = {
        "$defs": {"A": {"type": "object", **A}, "loop": {"$ref": "#/$defs/loop"}, "deep": {"items": {"$ref": "#"}}},
        "type": "object",
        "properties": {
            "one": REF,
            "two": {"allOf": [REF, B]},
            "x/y": {"$ref": "#/properties/one"},
            "z": {"$ref": "#a"},
        },
    }
    closed = json.loads(json.dumps(schema))
    close_objects(closed)
    assert closed["additionalProperties"] is False
    assert "additionalProperties" not in closed["$defs"]["A"]  # "two" needs its room
    value = {"one": {"a": 1}, "two": {"a": 1, "b": 2}}
    jsonschema.validate(value, {**closed, "properties": {**closed["properties"], "z": True}})
