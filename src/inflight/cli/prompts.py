"""Reads prompts for the command line: from arguments, text files, JSON lines (ours and OpenAI's) and standard input."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.batches.request_lines import MAX_CUSTOM_ID
from inflight.contracts.api.errors import InvalidRequestError

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt.

    Attributes:
        prompt, messages: text, token ids, or a chat.
        sampling: its own sampling parameters.
        custom_id: its id in the output.
        where: where it was read, for error messages.
        url, body: instead of all that, a request to the server's API: a line of one of OpenAI's batch files.
    """

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    custom_id: str | None = None
    where: str = ""
    url: str | None = None
    body: dict[str, Any] | None = None


def read_prompts(arguments: Iterable[str], file: Path | None) -> list[PromptLine]:
    """Read prompts from arguments, then from a file; from standard input if there is neither, or for `-`.

    Raises `InvalidRequestError`, which names the line, for input that cannot be read.
    """
    lines: list[PromptLine] = []
    for argument in arguments:
        lines += _from_stdin() if argument == "-" else [PromptLine(argument)]
    if file is not None:
        lines += _from_stdin() if str(file) == "-" else _from_file(file)
    elif not lines:
        lines = _from_stdin()
    if not lines:
        raise InvalidRequestError("there are no prompts; give some as arguments, with --file, or on standard input")
    return lines


def _from_file(file: Path) -> list[PromptLine]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt file {str(file)!r} cannot be read: {error}") from error
    return _parse(text, str(file), as_json=file.suffix in (".jsonl", ".ndjson"))


def _from_stdin() -> list[PromptLine]:
    if sys.stdin.isatty():
        print("inflight: type prompts, one per line, and end with Ctrl-D", file=sys.stderr)
    text = sys.stdin.read().removeprefix("\ufeff")
    return _parse(text, "standard input", as_json=text.lstrip().startswith('{"'))


def _parse(text: str, source: str, *, as_json: bool) -> list[PromptLine]:
    lines = text.replace("\r\n", "\n").split("\n")  # not splitlines: a JSON string may contain other line separators
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not as_json:
        return [PromptLine(line) for _, line in numbered]
    return [_parse_json(line, f"line {number} of {source}") for number, line in numbered]


def _parse_json(line: str, where: str) -> PromptLine:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if isinstance(value, str | list):
        return PromptLine(value)
    if isinstance(value, dict) and "body" in value:
        return _parse_batch(value, where)
    if not isinstance(value, dict) or sum(key in value for key in PROMPT_KEYS) != 1:
        raise InvalidRequestError(
            f"{where} must be a string, a list of token ids, an object with one of {PROMPT_KEYS}, or a request of "
            "OpenAI's batch format (custom_id, method, url, body)"
        )
    sampling = {key: entry for key, entry in value.items() if key not in (*PROMPT_KEYS, "custom_id")}
    prompt = value.get("prompt", value.get("prompt_token_ids"))
    return PromptLine(prompt, value.get("messages"), sampling, value.get("custom_id"), where)


def _parse_batch(value: dict[str, Any], where: str) -> PromptLine:
    """A line of an OpenAI batch file; the endpoint checks its body."""
    extra = sorted(value.keys() - {"custom_id", "method", "url", "body"})
    url, body, custom_id = value.get("url"), value["body"], value.get("custom_id")
    is_named = custom_id is None or (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID)
    is_post = value.get("method", "POST") == "POST" and isinstance(url, str) and isinstance(body, dict)
    if extra or not is_named or not is_post:
        found = f"; it has {extra}" if extra else ""
        raise InvalidRequestError(
            f'{where} must have a custom_id of 1 to {MAX_CUSTOM_ID} characters, the method "POST", a url such as '
            f'"/v1/chat/completions", a body that is an object, and nothing else{found}'
        )
    if body.get("stream"):
        raise InvalidRequestError(f"{where}: a request of a batch cannot stream")
    return PromptLine(custom_id=custom_id, where=where, url=url, body=body)
