"""Random schemas: each is refused, or every text sampled from allowed tokens is valid."""

import json
import math
import random
from typing import Any

import jsonschema
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.structured_output import StructuredOutput
from tests.grammar.helpers import TOKENIZERS, compiler, walk

TOKENIZER = TOKENIZERS["byte_level"]
COMPILER = compiler(TOKENIZER)
KEYS = st.sampled_from(["a", "b", "ä", "the", "$ref", "properties", ""])
NUMBERS = st.integers(-12, 12) | st.sampled_from([0.5, -2.25, 1e3, 10.0])
LENGTHS = st.integers(0, 5)
PATTERNS = st.sampled_from(["^a", "b$", "^[a-c]*$", "x|y", "^\\d{2,3}$", "", ".", "^the (dog|fox)?$"])
DATA = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=3,
)


def keywords(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any combination of schema keywords, including contradictory ones."""
    types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
    lists = st.lists(schemas, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
            "enum": st.lists(DATA, min_size=1, max_size=3),
            "const": DATA,
            "minimum": NUMBERS,
            "maximum": NUMBERS,
            "exclusiveMinimum": NUMBERS,
            "exclusiveMaximum": NUMBERS,
            "multipleOf": st.sampled_from([1, 2, 7, 0.5, 0.25]),
            "minLength": LENGTHS,
            "maxLength": LENGTHS,
            "pattern": PATTERNS,
            "format": st.sampled_from(["date", "ipv4", "uuid", "email"]),
            "minItems": LENGTHS,
            "maxItems": LENGTHS,
            "items": schemas,
            "prefixItems": lists,
            "properties": st.dictionaries(KEYS, schemas, max_size=3),
            "patternProperties": st.dictionaries(PATTERNS, schemas, max_size=2),
            "additionalProperties": schemas,
            "required": st.lists(KEYS, max_size=3, unique=True),
            "minProperties": LENGTHS,
            "maxProperties": LENGTHS,
            "anyOf": lists,
            "oneOf": lists,
            "allOf": lists,
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/a"]),
            "title": st.just("a remark"),
        },
    )


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=6)
FEW = st.recursive(  # a type and one or two keywords: fewer contradictions, so fewer refusals
    st.sampled_from([{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}, True]),
    lambda inner: st.builds(
        lambda schema, keep: {name: schema[name] for name in list(schema)[:keep]}, keywords(inner), st.integers(1, 3)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(schema=SCHEMAS | FEW, definition=FEW, seed=st.integers(0, 2**32))
def test_a_random_schema_is_refused_or_gives_valid_texts(schema: Any, definition: Any, seed: int) -> None:
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {"a": definition}}
    try:
        start = COMPILER.compile(StructuredOutput(json_schema=json.dumps(schema)))
    except InvalidRequestError:
        return
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for num_wandering in (0, 4, 20):
        text = walk(start.clone(), TOKENIZER, random.Random(seed), num_wandering)
        validator.validate(json.loads(text, parse_float=finite, parse_int=finite))


def finite(number: str) -> int | float:
    """JSON numbers have no limits, but the arithmetic of the validator does."""
    assume(math.isfinite(float(number)))
    return json.loads(number)
