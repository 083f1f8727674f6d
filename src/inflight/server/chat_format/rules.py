"""What the notations of arguments have in common: rules for JSON in Lark's notation, and references in schemas."""

import json
from collections.abc import Mapping
from typing import Any

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "$schema",
        "$id",
        "$comment",
        "readOnly",
        "x-guidance",
    }
)
"""Keywords that say nothing about which values are valid (or, the last, only about the white space of JSON)."""


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
    if found is None or not reference.startswith("#"):
        raise ValueError(f"the reference {reference!r} leads nowhere")
    return found
