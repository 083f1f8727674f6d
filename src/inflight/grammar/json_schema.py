"""Checks JSON schemas: everything enforceable is accepted, and nothing is silently ignored.

Unsupported keywords are refused by name and place; the grammar library refuses the rest. By the standard, unknown
keywords are annotations. Here that holds only for keywords of no JSON Schema draft that are not misspellings of known
ones.

`close_objects`: forbids properties that an object's schema does not name, unless the schema allows them explicitly.

The standard allows any others, and a weak model keeps inventing them until it runs out of tokens; schema authors do not
mean that, and other servers close objects, too. A schema combined with others (`allOf`, or `$ref` or `anyOf` beside
`properties`) must allow their properties.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any

from llguidance import LLMatcher

from inflight.contracts.api.errors import InvalidRequestError

_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")


def close_objects(root: dict[str, Any]) -> None:
    """Add `additionalProperties: false` where possible. Mutates the schema."""
    found: dict[int, dict[str, Any]] = {}
    is_open: set[int] = set()
    stack, seen = [(root, False)], set()
    while stack:
        schema, is_joined = stack.pop()
        if not isinstance(schema, dict) or (id(schema), is_joined) in seen:
            continue
        seen.add((id(schema), is_joined))
        found[id(schema)] = schema
        kinds = [name for name in _IN_PLACE if name in schema]
        has_company = bool(kinds) and ("properties" in schema or len(kinds) > 1 or _length(schema, "allOf") > 1)
        if is_joined or has_company:
            is_open.add(id(schema))
        stack.extend((each, is_joined or has_company) for each in _in_place(schema, root))
        stack.extend((each, False) for each in _inside(schema))
    for key, schema in found.items():
        if key not in is_open and _names_all(schema):
            schema.setdefault("additionalProperties", False)


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether all required properties are named."""
    named, required, least = schema.get("properties"), schema.get("required", ()), schema.get("minProperties", 0)
    if not isinstance(named, dict) or not isinstance(required, list | tuple) or not isinstance(least, int | float):
        return False
    return named.keys() >= set(map(str, required)) and least <= len(named)


def _in_place(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[Any]:
    """The schemas that apply to the same value."""
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            yield from schema[name]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield _pointed_at(reference, root)


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that apply to parts of the value. (Definitions apply only where they are referred to.)"""
    for name in ("properties", "patternProperties"):
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in ("items", "prefixItems", "additionalItems", "additionalProperties"):
        value = schema.get(name)
        yield from value if isinstance(value, list) else [value]


def _pointed_at(reference: str, root: dict[str, Any]) -> Any:
    """Resolve a JSON pointer into the schema; None for anything else."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    place: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict):
            place = place.get(name)
        else:
            return None
    return place


def _length(schema: dict[str, Any], name: str) -> int:
    return len(schema[name]) if isinstance(schema.get(name), list) else 0


# One space, or a line break and the next line's indentation, as people and models write. Without a bound a model might
# write spaces until it runs out of tokens.
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,80}"

# Limits on quadratic costs, in compilation or in computing masks.
MAX_SCHEMAS = 5000
MAX_OPTIONAL_PROPERTIES = 400
MAX_PATTERN_PROPERTIES = 100
MAX_FIRST_LOOKS = 16

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_IN_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_IN_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_DIRECT = {"items", "additionalItems", "additionalProperties"}
_OTHERS = {
    *("$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default", "readOnly"),
    *("writeOnly", "examples", "deprecated", "contentMediaType", "contentEncoding", "contentSchema", "$vocabulary"),
}
_KNOWN = _IN_MAPS | _IN_LISTS | _DIRECT | _OTHERS
_REFUSED = {
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    *("nullable", "extends", "disallow", "divisibleBy", "x-guidance"),
}
_EVALUATES_MORE = {"anyOf", "oneOf", "additionalProperties", "patternProperties", "if", "dependentSchemas"}
_REFERENCES = (
    *(("$dynamicAnchor", "$anchor"), ("$dynamicRef", "$ref"), ("$recursiveRef", "$ref")),
    ("$recursiveAnchor", "$comment"),
)
"""Dynamic references, and the static ones that are the same in one document."""
_SPELLINGS = {re.sub(r"[$_-]", "", name).lower(): name for name in sorted(_KNOWN | _REFUSED)}

# The library's formats check only syntax and allow 29 February in every year. These patterns restrict years and seconds
# as Python's `datetime` and others do: years from 1 on, no leap seconds. They apply to the beginning of a text, in
# addition to the format.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|{_YEAR}-(02-[01]|02-2[0-8]|0[13-9]-|1))"
_TIME = "[^:]*:[0-9]{2}:[0-5]"
_STRICTER: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}"},
    "date-time": {"pattern": f"^{_DATE}{_TIME}"},
    "time": {"pattern": f"^{_TIME}"},
    "hostname": {"maxLength": 253},
}


_NAME_SAYS_NOTHING = {"title", "description", "$comment"}
_DATE_PARTS, _TIME_PARTS = (
    r"(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)",
    r"(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)",
)
_WITHOUT_LOOK_AROUND = {
    # zod, beside the format "email"
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # zod, beside the format "duration"
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|{_DATE_PARTS}(T{_TIME_PARTS})?|T{_TIME_PARTS})$"
    ),
    # pydantic, for decimal numbers
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
"""Patterns that frameworks write, and those for the same texts without look-around."""

_FIRST_LOOK = re.compile(r"\^\(\?=((?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*)\)(?![*+?{])")
"""A look-ahead at the beginning of a pattern, without groups."""

_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_ZOD_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_ZERO, _ONES = (f"|{mark * 8}-{mark * 4}-{mark * 4}-{mark * 4}-{mark * 12}" for mark in "0f")
_UUIDS = (
    *(_UUID, f"^({_ZOD_UUID % '[1-8]'}{_ZERO})$", f"^({_ZOD_UUID % '[1-8]'}{_ZERO}{_ONES})$"),
    *(f"^({_ZOD_UUID % version})$" for version in range(1, 9)),
)
"""Patterns, zod's among them, whose texts all have the format "uuid"."""

_OF_ANY_TEXT = {"binary", "byte", "password", "path", "file-path", "directory-path"}
"""Formats of pydantic and OpenAPI that say what a text is for."""


@lru_cache(256)
def _is_known_format(name: str) -> bool:
    schema = {"type": "string", "format": name}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def checked_schema(text: str, *, is_exact: bool = False) -> dict[str, Any]:
    """Return the schema for the library. Raises `InvalidRequestError` if it is invalid or cannot be enforced.

    Args:
        is_exact: whether objects may have unnamed properties, as the standard says.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidRequestError("json_schema is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"json_schema is {text[:80]}; it must be a JSON object")
    is_one = text.count('"$id"') == ("$id" in schema)  # otherwise a dynamic reference depends on how it is reached
    num_patterns = 0
    bounds: dict[str, list[float]] = {name: [] for name in _BOUNDS}
    for num_schemas, (place, each) in enumerate(_schemas(schema), 1):
        patterns = each.get("patternProperties")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        if num_schemas > MAX_SCHEMAS or num_patterns > MAX_PATTERN_PROPERTIES:
            raise InvalidRequestError(
                f"json_schema is too large: at most {MAX_SCHEMAS} schemas and {MAX_PATTERN_PROPERTIES} "
                "patternProperties are accepted, counted with all that are inside it"
            )
        for dynamic, static in _REFERENCES if is_one else ():
            if dynamic in each and static not in each:
                each[static] = each.pop(dynamic)
        _simplify(each, schema)
        _check(place, each)
        for name, numbers in bounds.items():
            if isinstance(each.get(name), int | float):
                numbers.append(each[name])
        if isinstance(each.get("format"), str) and each["format"] in _STRICTER:
            _add(each, _STRICTER[each["format"]])
    _check_bounds(bounds)
    if not is_exact:
        close_objects(schema)
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _add(schema: dict[str, Any], *more: dict[str, Any]) -> None:
    """Demand more of a value. Mutates the schema."""
    given = schema.get("allOf", [])
    if more:
        schema["allOf"] = [*(given if isinstance(given, list) else [given]), *more]


def _simplify(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Rewrite no-ops, synonyms and what can be said otherwise in the library's form. Mutates the schema."""
    kinds = schema.get("type")
    if isinstance(schema.get("nullable"), bool) and schema.pop("nullable") and kinds is not None:  # OpenAPI's
        kinds = kinds if isinstance(kinds, list) else [kinds]
        schema["type"] = kinds if "null" in kinds else [*kinds, "null"]
    for excluded, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(excluded), bool) and schema.pop(excluded) and bound in schema:  # OpenAPI 3.0's
            schema[excluded] = schema.pop(bound)
    _simplify_text(schema)
    if "unevaluatedProperties" in schema:
        _close_whole(schema, root)
    _simplify_names(schema, root)


def _simplify_text(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"], looks = _without_first_looks(_WITHOUT_LOOK_AROUND.get(pattern, pattern))
        _add(schema, *looks)
    given = schema.get("format")
    if isinstance(given, str) and (given in _OF_ANY_TEXT or ("pattern" in schema and not _is_known_format(given))):
        del schema["format"]


def _without_first_looks(pattern: str) -> tuple[str, list[dict[str, Any]]]:
    """Return a pattern without the look-aheads at its beginning, and schemas that say the same as those."""
    bare = re.sub(r"\\.|\[(?:[^\]\\]|\\.)*\]", "", pattern)
    depths = accumulate((mark == "(") - (mark == ")") for mark in bare)
    looks: list[dict[str, Any]] = []
    if any(mark == "|" and depth == 0 for mark, depth in zip(bare, depths, strict=True)):
        return pattern, looks  # they are those of the first alternative
    while len(looks) < MAX_FIRST_LOOKS and (look := _FIRST_LOOK.match(pattern)):
        looks.append({"pattern": f"^(?:{look[1]})"})
        pattern = f"^{pattern[look.end() :]}"
    return pattern, looks


def _close_whole(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Replace `unevaluatedProperties` by `additionalProperties` where all evaluated names are known. Mutates the
    schema."""
    value = schema["unevaluatedProperties"]
    named: dict[str, Any] = {}
    stack: list[Any] = [] if value is True else [schema]
    seen = {id(schema)}
    for each in stack:  # grows
        mine = each.get("properties", {}) if isinstance(each, dict) else None
        if not isinstance(mine, dict) or not each.keys().isdisjoint(_EVALUATES_MORE):
            return
        if each is not schema and "unevaluatedProperties" in each:
            return
        named |= {name: {} for name in mine}
        parts = [part for part in _in_place(each, root) if id(part) not in seen]
        seen.update(map(id, parts))
        stack += parts
    if named:
        schema["properties"] = {**named, **schema.get("properties", {})}
    del schema["unevaluatedProperties"]
    schema.setdefault("additionalProperties", value)


def _simplify_names(schema: dict[str, Any], root: dict[str, Any]) -> None:
    names = {} if schema.get("propertyNames") is True else schema.get("propertyNames")
    if isinstance(names, dict) and isinstance(names.get("$ref"), str) and len(names) == 1:
        names = _pointed_at(names["$ref"], root)
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    names = {name: value for name, value in names.items() if name not in {"type", *_NAME_SAYS_NOTHING}}
    _simplify_text(names)
    if names.get("format") == "uuid" and names.setdefault("pattern", _UUID) in _UUIDS:
        del names["format"]
    if names and not schema.keys().isdisjoint(("properties", "patternProperties")):
        return
    values = schema.get("additionalProperties", {})
    match sorted(names.items()):
        case []:
            said: dict[str, Any] = {}
        case [("enum", [*choices])]:
            said = {
                "properties": {each: values for each in choices if isinstance(each, str)},
                "additionalProperties": False,
            }
        case [("pattern", str(pattern))]:
            said = {"patternProperties": {pattern: values}, "additionalProperties": False}
        case _ if names.keys() <= {"minLength", "maxLength"}:
            bounds = f"{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}"
            said = {"patternProperties": {rf"^[\s\S]{bounds}$": values}, "additionalProperties": False}
        case _:
            return
    del schema["propertyNames"]
    schema.update(said)


def _check(place: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword in _REFUSED:
            raise InvalidRequestError(f"json_schema has {keyword!r} at {place}, which cannot be enforced; leave it out")
        meant = _SPELLINGS.get(re.sub(r"[$_-]", "", keyword).lower())
        if keyword not in _KNOWN and meant is not None:
            raise InvalidRequestError(f"json_schema has {keyword!r} at {place}; did you mean {meant!r}?")
    if "$ref" in schema and place != "#" and not schema.keys().isdisjoint(("$id", "id")):
        raise InvalidRequestError(f"json_schema has an id beside $ref at {place}; drafts differ on what that refers to")
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        # Most patterns have none of these marks, and need no trial.
        is_doubtful = isinstance(pattern, str) and re.search(r"\(\?|\\[1-9k]", pattern) is not None
        if is_doubtful and LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            raise InvalidRequestError(
                f"json_schema has the pattern {pattern[:80]!r} at {place}, which cannot be enforced; write it without "
                "look-around and backreferences, or leave it out"
            )
    _check_properties(place, schema)


def _check_properties(place: str, schema: Mapping[str, Any]) -> None:
    required, named, least = schema.get("required"), schema.get("properties"), schema.get("minProperties")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    num_optional = len(named.keys() - needed) if isinstance(named, dict) else 0
    if num_optional > MAX_OPTIONAL_PROPERTIES:
        raise InvalidRequestError(
            f"json_schema has {num_optional} properties at {place} that are not required; at most "
            f"{MAX_OPTIONAL_PROPERTIES} are accepted in one object"
        )
    # Keys that `properties` does not name may be repeated, and a parser counts repeated keys as one property.
    num_sure = 1 + len(needed)
    if isinstance(least, int | float) and least > num_sure:
        raise InvalidRequestError(
            f"json_schema has minProperties {least} at {place}, which cannot be enforced beyond one more than what is "
            f"required ({num_sure} there); name more properties in 'required'"
        )


def _check_bounds(bounds: Mapping[str, list[float]]) -> None:
    """Refuse bounds for which the library would allow an excluded integer: those with another bound less than 1 away.
    Bounds of different schemas may combine through `allOf` or `$ref`, so all pairs are compared."""
    for excluded, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        whole = {number for number in bounds[excluded] if number == number // 1}
        for other, number in [(name, number) for name in others for number in bounds[name]]:
            near = (number // 1 if sign > 0 else -(-number // 1)) + 0  # the integer beyond it; no -0
            if number != near and near in whole:
                raise InvalidRequestError(
                    f"json_schema has {excluded} {near:g} and {other} {number:g}, which cannot be enforced together"
                )


def _schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema in `schema`, itself first, with its place as a JSON pointer; skips data (`const`, `enum`)."""
    stack: list[tuple[str, Any]] = [("#", schema)]
    while stack:
        place, each = stack.pop()
        if not isinstance(each, dict):
            continue  # true and false; the library refuses anything else
        yield place, each
        for keyword, value in each.items():
            if keyword in _IN_MAPS and isinstance(value, dict):
                stack.extend((f"{place}/{keyword}/{name}", part) for name, part in value.items())
            elif keyword in _IN_LISTS | _DIRECT and isinstance(value, list):
                stack.extend((f"{place}/{keyword}/{index}", part) for index, part in enumerate(value))
            elif keyword in _DIRECT:
                stack.append((f"{place}/{keyword}", value))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
