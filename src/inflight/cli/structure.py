"""Structured output from flags and from a JSON line's `structured_output`.

Human-readable numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.structured_output import StructuredOutput

LONG = 10.0
"""Seconds. Longer work is announced."""


def say_if_long(seconds: float, what: str = "") -> None:
    """Announce on standard error how long `what` takes, if long."""
    if seconds > LONG:
        about = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        click.echo(f"inflight: {what}about {about}", err=True)


def in_bytes(num_bytes: int) -> str:
    """A number of bytes with a unit."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"


def in_words(number: int) -> str:
    """A number of parameters in words."""
    for name, power in (("billion", 10**9), ("million", 10**6)):
        if number >= power:
            return f"{number / power:.3g} {name}"
    return f"{number:,}"


FLAGS = ("json_schema", "json_object", "regex", "choice", "grammar")


def from_flags(options: Mapping[str, Any]) -> StructuredOutput | None:
    """The structured output of the flags; None if none is given. Raises `ValueError`."""
    given = {name: options[name] for name in FLAGS if options[name] not in (None, ())}
    if not given:
        return None
    if "json_schema" in given:
        given["json_schema"] = _text_or_file("--json-schema", given["json_schema"], mark="{")
    if "grammar" in given:
        given["grammar"] = _text_or_file("--grammar", given["grammar"], mark=":")
    return StructuredOutput(**given)


def from_json(value: object) -> StructuredOutput | None:
    """The structured output of an object such as `{"regex": "[0-9]{4}"}`; a schema may be an object or its text. Raises
    `InvalidRequestError` for another value, `ValueError` for what is in the object."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f'structured_output is {value!r}; it must be an object such as {{"regex": "[0-9]+"}}')
    given = dict(value)
    if isinstance(given.get("json_schema"), dict | bool):
        given["json_schema"] = json.dumps(given["json_schema"])
    return StructuredOutput(**given)


def _text_or_file(flag: str, value: str, mark: str) -> str:
    """The value itself if it contains `mark`, which every such text has and file names rarely do; else the file's
    text."""
    if mark in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{flag}: the file {value!r} cannot be read: {error}") from error
