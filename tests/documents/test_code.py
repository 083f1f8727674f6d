"""Code in the documents fits the code: Python compiles and names what exists, commands have the options they show."""

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from pathlib import Path

import click
import pytest

import inflight
from inflight.cli import app
from inflight.contracts.api import features
from inflight.contracts.api.config import EngineConfig, FleetConfig
from inflight.contracts.api.foreign_names import FOREIGN_NAMES
from inflight.contracts.api.options import option_names
from tests.documents.pages import DOCUMENTS, ROOT, Block, blocks, code_in_text

PYTHON = blocks("python")
SHELL = blocks("sh", "bash")
JSON = blocks("json")


# ------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_names_what_exists(block: Block) -> None:
    check_python(_dedented(block.text))


def check_python(source: str) -> None:
    """Compile it, with `await` anywhere; look up what it imports from inflight, and the options that it gives."""
    tree = compile(source, "document", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "inflight":
            module = import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in inflight.__all__:
            accepted = options_of(node.func.id)
            for keyword in node.keywords:
                assert keyword.arg is None or keyword.arg in accepted, f"{node.func.id} has no option {keyword.arg}"


def options_of(name: str) -> set[str]:
    """What a class or function of ours may be given by name."""
    own = set(signature(getattr(inflight, name)).parameters)
    if name in ("SamplingParams", "StructuredOutput", "EngineConfig"):
        own |= {field.name for field in fields(getattr(inflight, name))}
    return own | option_names(EngineConfig) | option_names(FleetConfig) if "options" in own else own


@pytest.mark.parametrize(
    "wrong", ["from inflight import Engine", "LLM(max_seqs=4)", "SamplingParams(max_new_tokens=4)", "print('a'"]
)
def test_wrong_python_is_found(wrong: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        check_python(wrong)


def test_modules_that_are_imported_are_there() -> None:
    wanted = {
        (name.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for block in PYTHON
        for node in ast.walk(ast.parse(_dedented(block.text)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not {name for name in wanted if find_spec(name) is None}


def _dedented(text: str) -> str:
    width = min((len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip()), default=0)
    return "\n".join(line[width:] for line in text.split("\n"))


# ------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("block", JSON, ids=str)
def test_json_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.strip().split("\n"):
            json.loads(line)


# ------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("block", [block for block in SHELL if "inflight" in block.text], ids=str)
def test_commands_have_the_options_that_they_show(block: Block) -> None:
    for words in commands_of(block.text):
        check_command(words)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words after `inflight` of each such command in a block for a shell."""
    for line in text.replace("\\\n", " ").split("\n"):
        line = re.sub(r"\$[!\w]\w*", "1", line)  # whatever it is
        reader = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        reader.whitespace_split = True
        for is_end, words in groupby(reader, key=lambda word: set(word) <= set("|&;<>")):
            command = list(words)
            while command and (command[0] == "sudo" or re.match(r"[A-Z_]+=", command[0])):
                command = command[1:]
            if command[:2] == ["taskset", "-c"]:
                command = command[3:]
            if not is_end and command[:1] in (["inflight"], [".venv/bin/inflight"]):
                yield command[1:]


def check_command(words: list[str]) -> None:
    """Let click read the words, as it does before it runs a command."""
    context = click.Context(app, info_name="inflight")
    command: click.Command = app
    rest = words
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0]) if rest else None
        assert found is not None, f"there is no command {' '.join(words)!r}"
        command, rest = found, rest[1:]
    given = [os.devnull if before == "--config" else each for before, each in zip(["", *rest], rest, strict=False)]
    command.make_context(words[0], given, parent=context)


def test_commands_are_found_among_others() -> None:
    text = "A=1 inflight info  # x\ntaskset -c 0-5 inflight serve \\\n  --port $A &\necho | inflight chat > f\nx"
    assert list(commands_of(text)) == [["info"], ["serve", "--port", "1"], ["chat"]]


@pytest.mark.parametrize(
    "wrong",
    ["nothing", "serve --no-such-option", "serve --port many", "bench", "cache forget x", "generate --dtype float8 x"],
)
def test_wrong_commands_are_found(wrong: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check_command(wrong.split())


# ------------------------------------------------------------------------------------------------- code in the text


FOREIGN_OPTIONS = {
    "operating.md": {"--stop-timeout"},  # Docker's
    "containers.md": {"--stop-timeout", "--volume"},
    "performance.md": {"--no-repack", "--slot-save-path"},  # of llama.cpp
}
"""Options that are not ours, by document."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_and_commands_in_the_text_exist(path: Path) -> None:
    codes = code_in_text(path)
    if path.name == "coming-from.md":
        codes = [code for code in codes if code not in theirs(path)]
    foreign = FOREIGN_OPTIONS.get(path.name, set())
    for code in codes:
        words = code.split()
        if words[0] == "inflight" and len(words) > 1 and re.match(r"[a-z]", words[1]):
            command, options = command_of(words[1:])
            assert set(options) <= names_of(command), f"{code}: there is no such option"
        elif (option := re.match(r"(--[a-z][\w-]*|-[a-z]{1,2})(?![\w-])", words[0])) and option[1] not in foreign:
            assert option[1] in ALL_OPTIONS, f"{code}: no command has it"


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the options among them."""
    command: click.Command = app
    context = click.Context(app)
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    return command, [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def names_of(command: click.Command) -> set[str]:
    """All names of its options."""
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def all_commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from all_commands(command)


OF_BENCHMARKS = {
    name
    for path in (ROOT / "benchmarks").rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)  # environments of peers
    for name in re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8"))
}
ALL_OPTIONS = {name for command in all_commands(app) for name in names_of(command)} | OF_BENCHMARKS


def theirs(path: Path) -> set[str]:
    """Code in the first columns of tables: what another engine calls something."""
    rows = re.findall(r"^\| (.*?) \|", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`([^`]+)`", row)}


def test_names_of_others_are_answered_with_ours_as_the_document_says() -> None:
    """What stands in a table beside an option that another engine calls otherwise is in the answer to that option."""
    table = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
    for first, second in re.findall(r"^\| (.*?) \| (.*?) \|", table, re.MULTILINE):
        ours = {name.replace("-", "_") for name in re.findall(r"`--(?:no-)?([\w-]+)", second)}
        for name in re.findall(r"`(?:--)?([\w-]+)", first):
            known = FOREIGN_NAMES.get(name.replace("-", "_"))
            if known is not None and ours:
                named = set(re.findall(r"\{?(\w+)\}?", known))
                assert ours & {"threads" if each == "num_threads" else each for each in named}, name


def test_the_table_of_what_is_not_supported_is_that_of_the_code() -> None:
    assert features.table() in (ROOT / "docs" / "reference" / "features.md").read_text()
