"""A GGUF file in several parts: `NAME-00001-of-00003.gguf` and so on, as llama.cpp's `gguf-split` calls them. The first
has the metadata."""

import re
from collections.abc import Iterable

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def parts_of(name: str) -> list[str]:
    """The names of all parts of a file, of which `name` is one; only `name`, if it is none."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    stem, _, count, suffix = match.groups()
    return [f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def without_further_parts(names: Iterable[str]) -> list[str]:
    """Names of files, of which parts after the first are left out if the first is there."""
    given = list(names)
    return [name for name in given if parts_of(name)[0] == name or parts_of(name)[0] not in given]
