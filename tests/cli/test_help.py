"""What `--help` prints, and how options are read."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from inflight.cli import HEADINGS, app
from inflight.cli.help import RARE
from inflight.cli.options import size
from inflight.contracts.api.config import EngineConfig
from tests.command import Command


def commands() -> Iterator[tuple[str, click.Command]]:
    for name, command in app.commands.items():
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())


COMMANDS = dict(commands())


def help_of(name: str, width: int = 100, flag: str = "--help") -> str:
    done = CliRunner().invoke(app, [*name.split(), flag], terminal_width=width)
    assert done.exit_code == 0
    return done.output


def test_all_commands_are_listed_with_whole_sentences() -> None:
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(app.commands)
    text = " ".join(help_of("").split())
    for name, command in COMMANDS.items():
        summary = command.get_short_help_str()
        assert summary, name
        assert not summary.endswith((".", "…")), name
        assert " " in name or f"{name} {summary}" in re.sub(r" +", " ", text), name
    assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if "max_num_seqs" in {p.name for p in COMMANDS[name].params}]
)
def test_options_of_the_engine_stand_under_headings_and_show_their_defaults(name: str) -> None:
    text = " ".join(help_of(name, flag="--help-all").split())
    order = [text.index(f"{heading}: ") for heading in ("Options", "Batching", "Cache")]
    assert order == sorted(order)
    if name == "simulate":  # its defaults are those of the recording
        return
    shown = {"race": "8", "show": "one less than there are prompts", "profile": "--num-seqs"}.get(name, "64")
    assert re.search(rf"--max-num-seqs INTEGER [^\[]*\[default: {shown}\]", text)
    assert f"[default: {EngineConfig().scheduling.max_num_batched_tokens}]" in text
    assert re.search(r"--kv-cache-memory SIZE [^\[]*\[default: ", text)


def test_what_most_users_do_not_need_is_left_to_another_option() -> None:
    flags = {param.name: param.opts[-1] for param in COMMANDS["serve"].params if isinstance(param, click.Option)}
    rare, common = {flags.get(name, "") for name in RARE}, {flag for name, flag in flags.items() if name not in RARE}
    shown, all_shown = help_of("serve", 80), help_of("serve", 80, "--help-all")
    assert all(re.search(rf"(^|\s){flag}\b", shown) for flag in common)
    assert all(re.search(rf"(^|\s){flag}\b", all_shown) for flag in (*common, *rare) if flag)
    assert not any(re.search(rf"^  {flag}\b", shown, re.MULTILINE) for flag in rare if flag)
    assert len(common) <= 40
    assert len(shown.splitlines()) <= 100  # two screens
    assert {param.name for each in COMMANDS.values() for param in each.params} >= RARE


def test_every_option_that_takes_a_value_shows_what_applies_without_it() -> None:
    """Text of the model's own choosing, or a list that is empty, needs no default."""
    for name in ("generate", "chat", "info", "race", "show"):
        for option in COMMANDS[name].params:
            shared = isinstance(option, click.Option) and getattr(option, "heading", "Options") != "Options"
            if shared and not option.is_flag and not option.multiple and option.name not in STRUCTURE:
                assert "[default: " in (option.help or ""), f"{name} {option.name}"


STRUCTURE = ("json_schema", "json_object", "regex", "choice", "grammar")


def test_the_model_has_one_option_and_may_stand_alone_where_nothing_else_does(refused: Command) -> None:
    with_model = {name for name, command in COMMANDS.items() if "model" in {param.name for param in command.params}}
    assert with_model >= {"generate", "chat", "serve", "info", "show", "race", "profile"}
    for name in with_model:
        assert {"-m", "--model"} <= {flag for param in COMMANDS[name].params for flag in param.opts}, name
    assert "there are two models: 'a', and 'b' with --model" in refused("info", "a", "-m", "b").stderr
    for arguments in (["info", "/nowhere/at/all"], ["info", "-m", "/nowhere/at/all"]):
        assert "there is no model folder '/nowhere/at/all'" in refused(*arguments).stderr


def test_an_option_of_another_engine_is_answered_with_ours(refused: Command) -> None:
    for command in ("generate", "serve", "info"):
        done = refused(command, "x", "--gpu-memory-utilization", "0.9")
        assert "--gpu-memory-utilization; --kv-cache-memory says how many bytes keys and values may take" in done.stderr
    assert "--no-such-thing" in refused("info", "--no-such-thing").stderr


def test_a_chat_has_one_answer() -> None:
    assert "--n " not in help_of("chat")
    assert "--n " in help_of("generate")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1000000", 1_000_000),
        ("2G", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("64 k", 64 * 1024),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 * 2**29),
        ("7B", 7),
    ],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "2X", "G", "-1G", "1.5.5G", "2iB", "two"])
def test_other_texts_are_no_sizes(text: str, refused: Command) -> None:
    done = refused("info", f"--kv-cache-memory={text}")
    assert f"{text!r} is not a size; give bytes, or a number with a unit, such as 2G, 512MiB or 1.5GB" in done.stderr


def test_a_cache_of_a_size_with_a_unit(command: Command) -> None:
    done = command("info", "--json", "--kv-cache-memory", "1MiB")
    assert '"num_blocks": 16,' in done.stdout
