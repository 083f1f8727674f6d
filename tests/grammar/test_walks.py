"""The promise: every text sampled from allowed tokens is valid, and there is always an allowed token."""

import json
import random
import re

import jsonschema
import pytest

from tests.grammar.helpers import TOKENIZERS, matcher, walk
from tests.text.tokenizers_for_tests import ALL

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
            "tags": {"type": "array", "items": {"enum": ["rot", "grün", "😀"]}, "minItems": 1, "maxItems": 3},
            "inner": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        },
        "required": ["name", "tags", "inner"],
        "additionalProperties": False,
    },
    "recursion": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "any of": {"anyOf": [{"type": "boolean"}, {"const": {"ä": [1, None]}}, {"type": "array", "prefixItems": [{}]}]},
    "all of": {"allOf": [{"type": "integer", "minimum": -7}, {"maximum": 30, "multipleOf": 3}]},
    "one of": {"oneOf": [{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "number", "maximum": 2.5}]},
    "formats": {"items": {"anyOf": [{"type": "string", "format": name} for name in ("date", "ipv4", "email")]}},
    "uuid": {"type": "string", "format": "uuid"},
    "a pattern with a length": {"type": "string", "pattern": "a|b", "minLength": 3, "maxLength": 9},
    "additional properties": {
        "type": "object",
        "properties": {"n": {"type": "null"}},
        "patternProperties": {"^i_": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    },
    "a map of at least one": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "unicode": {"enum": ["", 'ä\u0000\n"\\', "👩‍👩‍👧", {"ß": "\u2028"}, 1.5, -3]},
    "anything": True,
}
REGEXES = [
    r"[A-Z][a-z]{1,8} ([0-9]{2}|x)?",
    r"(?i:yes|no|vielleicht)",
    r"^[^a-z\n\"]{3,5}$",
    r"你好|(ü|😀)*\.",
    r"(\+|-)?[0-9]+(,[0-9]{3})*",
    "",
]
CHOICES = ["yes", "yes!", "no", "", 'a "quoted" \\ one', "line\nbreak", "😀ß", "a.*b", "<s>", "</s>", "\x00"]
SUMS = 'start: sum\nsum: term (("+" | "-") term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/\n'
SUMS_IN_GBNF = 'root ::= sum\nsum ::= term (("+" | "-") term)*\nterm ::= [0-9] [0-9]? [0-9]? | "(" sum ")"\n'


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_walks_give_json_that_the_schema_accepts(name: str, tokenizer_name: str) -> None:
    tokenizer, schema = TOKENIZERS[tokenizer_name], SCHEMAS[name]
    start = matcher(tokenizer, json_schema=json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = {walk(start.clone(), tokenizer, random.Random(seed), 5 * seed) for seed in range(12)}
    for text in texts:
        validator.validate(json.loads(text))
    assert len(texts) > 2, "walks that go different ways"


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_walks_give_any_json_object(tokenizer_name: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]
    start = matcher(tokenizer, json_object=True)
    for seed in range(12):
        assert isinstance(json.loads(walk(start.clone(), tokenizer, random.Random(seed), 5 * seed)), dict)


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("regex", REGEXES)
def test_walks_give_text_that_the_regex_matches(regex: str, tokenizer_name: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]
    start = matcher(tokenizer, regex=regex)
    for seed in range(12):
        text = walk(start.clone(), tokenizer, random.Random(seed), 3 * seed)
        assert re.fullmatch(regex, text), text


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_walks_give_every_choice_and_nothing_else(tokenizer_name: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]
    start = matcher(tokenizer, choice=CHOICES)
    seen = {walk(start.clone(), tokenizer, random.Random(seed), 100) for seed in range(150)}
    assert seen == set(CHOICES)


@pytest.mark.parametrize("grammar", [SUMS, SUMS_IN_GBNF], ids=["Lark", "GBNF"])
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_walks_give_text_of_the_grammar(grammar: str, tokenizer_name: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]
    start = matcher(tokenizer, grammar=grammar)
    for seed in range(12):
        text = walk(start.clone(), tokenizer, random.Random(seed), 3 * seed)
        assert re.fullmatch(r"[-+0-9()]+", text)
        eval(re.sub(r"\b0+(?=\d)", "", text))  # balanced, with an operand at each side


def test_walks_match_the_regex_in_a_vocabulary_without_bytes() -> None:
    tokenizer = ALL["metaspace"]
    start = matcher(tokenizer, regex="( (The|the|über) [a-z]{2,6},?)+")
    texts = {walk(start.clone(), tokenizer, random.Random(seed), 3 * seed) for seed in range(12)}
    assert all(re.fullmatch("( (The|the|über) [a-z]{2,6},?)+", text) for text in texts)
    assert len(texts) > 6
