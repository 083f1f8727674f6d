"""Renders a Helm chart: by `helm template` where that is installed, else by as much of Helm's language as ours needs.

Ours: fields of `.Values` and `.Release`, `.` in a range, `if`, `range`, `end`, `not`, `add`, and pipelines into
`quote`, `toYaml` and `nindent`. Whatever else stands in a template fails.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

RELEASE = "my-model"
ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
Values = dict[str, Any]


def by_helm(chart: Path, values: Values, folder: Path) -> list[Any]:
    """The chart's documents, as helm makes them, and, where kubeconform is installed, finds them right."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    command = ["helm", "template", RELEASE, str(chart), "--values", str(folder / "values.yaml")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if shutil.which("kubeconform"):
        subprocess.run(["kubeconform", "-strict"], input=text, text=True, check=True)
    return [each for each in yaml.safe_load_all(text) if each]


def by_ours(chart: Path, values: Values, _: Path) -> list[Any]:
    """The chart's documents."""
    scope = {"Values": _merged(yaml.safe_load((chart / "values.yaml").read_text()), values)}
    scope["Release"] = {"Name": RELEASE}
    texts = [_rendered(path.read_text(), scope) for path in sorted((chart / "templates").glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _merged(defaults: Values, values: Values) -> Values:
    merged = deepcopy(defaults)
    for name, value in values.items():
        is_deeper = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if is_deeper else value
    return merged


def _rendered(template: str, scope: Any) -> str:
    pieces: list[tuple[bool, str]] = []  # whether it is an action, and what it says
    rest = template
    while (match := ACTION.search(rest)) is not None:
        before, rest = rest[: match.start()], rest[match.end() :]
        pieces += [(False, before.rstrip() if match[1] else before), (True, match[2])]
        rest = rest.lstrip() if match[3] else rest
    pieces.append((False, rest))
    pending = iter(pieces)
    text = "".join(_block(pending, scope, is_inside=False))
    assert next(pending, None) is None
    return text


def _block(pieces: Iterator[tuple[bool, str]], dot: Any, *, is_inside: bool) -> list[str]:
    """What is rendered up to the end of a block, or of the template."""
    out: list[str] = []
    for is_action, text in pieces:
        if not is_action:
            out.append(text)
        elif text == "end":
            assert is_inside
            return out
        elif text.startswith(("if ", "range ")):
            keyword, _, condition = text.partition(" ")
            value = _value(condition, dot)
            inner = list(_until_end(pieces))
            dots = ([dot] if value else []) if keyword == "if" else value
            for each in dots:
                out += _block(iter(inner), each, is_inside=True)
        else:
            out.append(str(_value(text, dot)))
    assert not is_inside
    return out


def _until_end(pieces: Iterator[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    depth = 1
    for piece in pieces:
        yield piece
        is_action, text = piece
        if is_action:
            depth += text.startswith(("if ", "range ")) - (text == "end")
        if depth == 0:
            return
    raise AssertionError("a block does not end")


def _value(pipeline: str, dot: Any) -> Any:
    first, *others = (each.split() for each in pipeline.split("|"))
    value = _call(first, dot)
    for words in others:
        value = FUNCTIONS[words[0]](*(_operand(word, dot) for word in words[1:]), value)
    return value


def _call(words: list[str], dot: Any) -> Any:
    if words[0] in FUNCTIONS:
        return FUNCTIONS[words[0]](*(_operand(word, dot) for word in words[1:]))
    (word,) = words
    return _operand(word, dot)


def _operand(word: str, dot: Any) -> Any:
    if word.isdigit():
        return int(word)
    assert word.startswith("."), word
    for name in filter(None, word.split(".")):
        dot = dot[name]
    return dot


def _nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line for line in text.splitlines())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "not": lambda value: not value,
    "add": lambda *numbers: sum(numbers),
    "quote": lambda value: json.dumps(str(value)),
    "toYaml": lambda value: yaml.safe_dump(value).rstrip(),
    "nindent": _nindent,
}
