"""`close_objects`: forbids properties that an object's schema does not name, unless the schema allows them explicitly.

The standard allows any others, and a weak model keeps inventing them until it runs out of tokens; schema authors do not
mean that, and other servers close objects, too. A schema combined with others (`allOf`, or `$ref` or `anyOf` beside
`properties`) must allow their properties.
"""

from collections.abc import Iterator
from typing import Any

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
