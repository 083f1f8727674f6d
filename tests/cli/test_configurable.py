"""Options of `inflight serve` from a file, from the environment and from the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from inflight.cli.serve import Address, serve

FILE = """
model = "a model"
port = 8001
max-num-seqs = 12
max_body_size = "4MiB"
ui = false
strict = true
cors-origin = ["http://a", "http://b"]
request-timeout = 2.5
adapter = ["tales=./tales"]
limit-mm-per-prompt = '{"image": 4}'
"""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command was started with."""
    seen: dict[str, Any] = {}

    def start(model: str | None, address: Address, names: tuple[str, ...], options: dict[str, Any]) -> None:
        seen.update(options, model=model, hosts=address.hosts, port=address.port, names=names)

    monkeypatch.setattr(sys.modules["inflight.cli.serve"], "serve_model", start)
    return seen


def run(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(serve, arguments, env=variables)


def file(tmp_path: Path, text: str = FILE) -> str:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return str(path)


def test_a_file_has_options(tmp_path: Path, given: dict[str, Any]) -> None:
    result = run("--config", file(tmp_path))
    assert result.exit_code == 0, result.output
    assert (given["model"], given["port"], given["hosts"]) == ("a model", 8001, ("127.0.0.1",))
    assert (given["max_num_seqs"], given["max_body_size"], given["request_timeout"]) == (12, 4 * 2**20, 2.5)
    assert (given["ui"], given["strict"], given["log_text"]) == (False, True, None)
    assert given["cors_origins"] == ("http://a", "http://b")
    assert (given["adapters"], given["limit_mm_per_prompt"]) == ({"tales": "./tales"}, {"image": 4})


def test_variables_count_more_than_the_file_and_the_command_line_most(tmp_path: Path, given: dict[str, Any]) -> None:
    result = run(
        *("another", "--config", file(tmp_path), "--port", "8003", "--ui"),
        INFLIGHT_SERVE_PORT="8002",
        INFLIGHT_SERVE_MAX_NUM_SEQS="13",
        INFLIGHT_SERVE_STRICT="0",
    )
    assert result.exit_code == 0, result.output
    assert (given["model"], given["port"], given["max_num_seqs"], given["ui"]) == ("another", 8003, 13, True)
    assert given["strict"] is False


def test_what_applies_can_be_printed_and_read_again(tmp_path: Path, given: dict[str, Any]) -> None:
    printed = run("--config", file(tmp_path), "--port", "8003", "--print-config")
    assert printed.exit_code == 0, printed.output
    assert not given
    lines = printed.output.splitlines()
    assert "port = 8003" in lines
    assert 'cors-origin = ["http://a", "http://b"]' in lines
    assert {'adapter = ["tales=./tales"]', 'limit-mm-per-prompt = "image=4"'} <= set(lines)
    assert '# host = ["127.0.0.1"]' in lines
    assert run("--config", file(tmp_path, printed.output)).exit_code == 0
    first = dict(given)
    given.clear()
    assert run("--config", file(tmp_path), "--port", "8003").exit_code == 0
    assert given == first
    uncommented = "\n".join(line.removeprefix("# ") for line in lines if " = " in line)
    assert run("--config", file(tmp_path, uncommented), "--print-config").exit_code == 0, uncommented


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq = 3", "there is no option 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ("port = true", "port is True; it must be a text or a number"),
        ("ui = 1", "ui is 1; it must be true or false"),
        ("[serve]\nport = 1", "there is no option 'serve'"),
        ("port = ", "is not TOML"),
        ("port = 70000", "70000 is not in the range"),
        ('limit-mm-per-prompt = "4"', "'4' is no limit; give JSON"),
        ('config = "b.toml"', "there is no option 'config'"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, given: dict[str, Any], text: str, message: str) -> None:
    result = run("--config", file(tmp_path, text))
    assert result.exit_code == 2
    assert message in result.output
    assert not given


def test_a_missing_file_and_an_unknown_variable_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    missing = run("--config", str(tmp_path / "nope.toml"))
    assert (missing.exit_code, "cannot be read: No such file" in missing.output) == (2, True)
    unknown = run(INFLIGHT_SERVE_PROT="3")
    assert unknown.exit_code == 2
    assert "the variable INFLIGHT_SERVE_PROT names no option of this command" in unknown.output
    assert "did you mean 'INFLIGHT_SERVE_PORT'?" in unknown.output
    assert not given


def test_every_option_can_stand_in_a_file() -> None:
    names = json.loads(json.dumps(sorted(serve._options())))  # type: ignore[attr-defined]
    flags = {param.name for param in serve.params if isinstance(param, click.Option)}
    assert len(names) == len(flags - {"config", "print_config", "help_all"})
