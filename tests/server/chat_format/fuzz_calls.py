"""Writes calls at random in each notation and reads them in pieces: however a text is cut, its calls are the same, and
where a notation has quotes, they are the ones that were written.

python -m tests.server.chat_format.fuzz_calls --number 100_000 [--notation glm-4.5]
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from inflight.server.chat_format.answer_template import answer_template_of
from inflight.server.chat_format.call_text import SearchBudget
from inflight.server.chat_format.families import MarkedArguments
from tests.server.chat_format.pieces import read_all
from tests.server.chat_format.scripted import cut
from tests.server.chat_format.test_notations import NOTATIONS, Notation, fragments
from tests.server.chat_format.test_template_reader import parts_of
from tests.text.tokenizers_for_tests import byte_level

PROPERTIES = {"city": {"type": "string"}, "unit": {"type": "string"}, "number": {"type": "number"}, "data": {}}
SCHEMA = {"type": "object", "properties": {**PROPERTIES, "data": {"type": "object"}}}
NAMES = ("weather", "get-time.v2")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
PLAIN = "ab 1.,;é😀'-\n"


def text_of(rng: random.Random, hostile: Sequence[str]) -> str:
    pieces = hostile or PLAIN
    return "".join(rng.choice(pieces if rng.random() < 0.7 else PLAIN) for _ in range(rng.choice((0, 1, 2, 4, 7))))


def value_of(rng: random.Random, hostile: Sequence[str], depth: int = 2) -> Any:
    match rng.randrange(7 if depth else 4):
        case 0:
            return rng.choice((0, -1, 2.5, 1e-7, 10**20))
        case 1:
            return rng.choice((True, False, None))
        case 2 | 3:
            return text_of(rng, hostile)
        case 4:
            return [value_of(rng, hostile, depth - 1) for _ in range(rng.randrange(3))]
        case _:
            return {f"k{number}": value_of(rng, hostile, depth - 1) for number in range(rng.randrange(3))}


def calls_of(rng: random.Random, hostile: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        arguments = {
            "city": text_of(rng, hostile),
            "unit": text_of(rng, hostile),
            "number": rng.choice((0, -7, 2.5, 10**15)),
            "data": {"k": value_of(rng, hostile)},
        }
        kept = rng.sample(sorted(arguments), rng.randrange(5))
        calls.append((rng.choice(NAMES), {key: arguments[key] for key in kept}))
    return calls


def spelled(value: Any) -> Any:
    """A value with texts for all that is no object and no array, and for empty ones."""
    if isinstance(value, dict):
        return {key: spelled(each) for key, each in value.items()} or ""
    if isinstance(value, list):
        return [*map(spelled, value)] or ""
    return value if isinstance(value, str) else json.dumps(value)


class Fuzzer:
    """Checks one notation."""

    def __init__(self, name: str) -> None:
        self.notation: Notation = NOTATIONS[name]
        template = answer_template_of(byte_level(), self.notation.template)
        assert template is not None
        assert template.call_format is not None
        self.template, self.has_quotes = template, template.call_format.arguments is None
        arguments = template.call_format.arguments
        self.is_nested = isinstance(arguments, MarkedArguments) and arguments.is_nested
        self.may_repeat = self.notation.between is not None or template.call_format.between_objects is not None
        self.hostile = [*fragments(self.notation), ", ", '{"name": "weather", "arguments": {}}', "]", "[", "```"]

    def read(self, pieces: Sequence[str], *, is_guaranteed: bool = False) -> tuple[Any, ...]:
        reader = self.template.reader("", TOOLS, NAMES, is_guaranteed=is_guaranteed)
        return parts_of(read_all(reader, pieces))

    def meant(self, calls: Iterable[Any]) -> list[Any]:
        """What of calls a notation tells: without quotes within values, there are no types where a schema has none."""
        return [(name, spelled(given) if self.is_nested else given) for name, given in calls]

    def check(self, rng: random.Random) -> None:
        """Check one text."""
        is_hostile = rng.random() < 0.7
        calls = calls_of(rng, self.hostile if is_hostile else ())
        calls = calls if self.may_repeat else calls[:1]
        text = self.notation.write_all(*calls)
        whole = self.read([text])
        if self.has_quotes or not is_hostile:
            assert self.meant(whole) == self.meant(calls), (calls, text, whole)
        if self.has_quotes:  # arguments are streamed
            pieces = rng.choice(([text], list(text), cut(text, rng.choices(range(len(text)), k=5))))
            assert self.read(pieces, is_guaranteed=True) == tuple(calls), (text, pieces)
        if rng.random() < 0.3:
            text = rng.choice(("", "Well,\n", "<think>", "Hm</think>")) + text[: rng.randrange(len(text) + 1)]
            text += rng.choice(("", " And then.", self.notation.write_all(*calls)))
            whole = self.read([text])
        kind = rng.randrange(50)
        ways = [cut(text, rng.choices(range(len(text) + 1), k=rng.randrange(1, 8))) for _ in range(2)]
        if kind == 0:
            ways += [[text[:place], text[place:]] for place in range(1, len(text))]
        elif kind < 12:
            ways.append(list(text))
        for pieces in ways:
            read = self.read(pieces)
            assert read == whole, (text, pieces, read, whole)


def unbounded(_: SearchBudget, __: str, find: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A search without clocks, which take most of the time."""
    found = find(*args, **options)
    return list(found) if isinstance(found, Iterator) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=100_000)
    parser.add_argument("--notation", choices=list(NOTATIONS), action="append")
    options = parser.parse_args()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(SearchBudget, "search", unbounded)
    for name in options.notation or NOTATIONS:
        fuzzer, rng, start = Fuzzer(name), random.Random(f"{options.seed} {name}"), time.monotonic()
        for _ in range(options.number):
            fuzzer.check(rng)
        print(f"{name}: {options.number:,} texts, 0 differ ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
