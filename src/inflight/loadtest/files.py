"""Reads requests from files: prompts, conversations, and traces with arrival times. Decides the contents of a line.

Errors name the line and say what would be accepted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from inflight.loadtest.workloads import Prompt, Sketch
from inflight.simulate import Lengths

CHARACTERS_PER_TOKEN = 4
"""A rule of thumb for English text; estimates the length of answers of which only the text is known."""


def read_prompts(path: Path, outputs: Lengths, seed: int) -> list[Sketch]:
    """Read a file's prompts, in order. Entries without an output length get one from `outputs`.

    The file is JSON lines, or one JSON list. An entry is a string, a list of token ids, an object with "prompt" or
    "messages" (and "output_tokens", or "max_tokens"), or one with "conversations" as in ShareGPT: the first turn is the
    prompt, and the length of the answer to it is estimated from its characters.

    Raises:
        ValueError: the file cannot be read, or an entry is none of these.
    """
    return _read(path, _prompt, outputs, seed)


def read_trace(path: Path, outputs: Lengths, seed: int) -> list[Sketch]:
    """Read a trace's requests in order of time; the first arrives at second 0.

    An entry is an object with "timestamp" (seconds), "prompt" or "prompt_tokens" (a number of random tokens), and
    "output_tokens" (default: a length from `outputs`).

    Raises:
        ValueError: the file cannot be read, or an entry is none of these.
    """
    sketches = _read(path, _trace_entry, outputs, seed)
    sketches.sort(key=lambda sketch: sketch.arrival or 0.0)
    start = sketches[0].arrival or 0.0
    return [Sketch(each.prompt, each.num_output_tokens, (each.arrival or 0.0) - start) for each in sketches]


def _read(path: Path, convert: Callable[[Any, int], Sketch], outputs: Lengths, seed: int) -> list[Sketch]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {str(path)!r} cannot be read: {error}") from error
    entries, sketches = _entries(text), []
    lengths = outputs.draw(np.random.default_rng((seed, 2)), len(entries))
    for (where, entry), length in zip(entries, lengths, strict=True):
        try:
            sketches.append(convert(entry, length))
        except ValueError as error:
            raise ValueError(f"{where} of {path}: {error}") from None
    if not sketches:
        raise ValueError(f"the file {str(path)!r} has no requests in it")
    return sketches


def _entries(text: str) -> list[tuple[str, Any]]:
    """Return a file's entries, each with its place: the members of one list, or the lines."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list) and not all(isinstance(token, int) for token in whole):
        return [(f"entry {number}", entry) for number, entry in enumerate(whole, start=1)]
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(where, _parsed(line)) for where, line in lines]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None  # refused later as an invalid entry


def _prompt(entry: Any, num_output_tokens: int) -> Sketch:
    if not isinstance(entry, dict):
        return Sketch(_checked(entry), num_output_tokens)
    if "conversations" in entry:
        said, answer = _first_exchange(entry["conversations"])
        return Sketch(said, max(1, len(answer) // CHARACTERS_PER_TOKEN) if answer else num_output_tokens)
    if isinstance(entry.get("messages"), list) and entry["messages"]:
        return Sketch(entry["messages"], _output_tokens(entry, num_output_tokens))
    return Sketch(_checked(entry.get("prompt")), _output_tokens(entry, num_output_tokens))


def _trace_entry(entry: Any, num_output_tokens: int) -> Sketch:
    time = entry.get("timestamp") if isinstance(entry, dict) else None
    if not isinstance(time, int | float) or isinstance(time, bool):
        raise ValueError('a trace needs an object with a "timestamp" in seconds')
    prompt: Prompt | int
    if "prompt" in entry:
        prompt = _checked(entry["prompt"])
    elif _is_count(entry.get("prompt_tokens")):
        prompt = entry["prompt_tokens"]
    else:
        raise ValueError('a trace needs "prompt", or "prompt_tokens" of at least 1')
    return Sketch(prompt, _output_tokens(entry, num_output_tokens), float(time))


def _first_exchange(conversation: Any) -> tuple[str, str]:
    """Return the first turn of a conversation and the answer to it ("" if there is none)."""
    turns = conversation if isinstance(conversation, list) else []
    said = [turn.get("value") for turn in turns if isinstance(turn, dict) and turn.get("from") != "system"]
    texts = [value for value in said if isinstance(value, str)]
    if not texts or not texts[0] or len(texts) < len(said):
        raise ValueError('"conversations" must be a list of objects with "from" and a text as "value"')
    return texts[0], texts[1] if len(texts) > 1 else ""


def _checked(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and token >= 0 for token in prompt):
        return prompt
    raise ValueError(
        'it must be JSON: a text, a list of token ids, or an object with "prompt", "messages" or "conversations"'
    )


def _output_tokens(entry: dict[str, Any], otherwise: int) -> int:
    count = entry.get("output_tokens", entry.get("max_tokens", otherwise))
    if not _is_count(count):
        raise ValueError(f"the number of output tokens is {count!r}; it must be an integer of at least 1")
    return int(count)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
