"""`inflight show` as a user runs it."""

import re
from html import unescape
from pathlib import Path

import pytest

from tests import zoo
from tests.command import Command

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "command-line.md"
PROMPTS = ("Once upon a time", "One morning", "In a quiet village there lived a clever fox named Felix")


def drawn_steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+): total_q", text, re.MULTILINE)]


def test_without_options_a_newcomers_prefill_joins_anothers_decode_in_the_slot_that_became_free(
    command: Command,
) -> None:
    done = command("show")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[1:5] == ["slot 0   AaaaC", "slot 1   Bbbbb", "waiting  1111", "shown       ^^"]
    assert drawn_steps(done.stdout) == [3, 4]
    handover = "C takes slot 0, which A has left, and its tokens share this row with the decode of B"
    assert lines.count(handover) == 1
    last = lines[lines.index(handover) :]
    assert re.match(r"B  decode\(1\)   slot 1  6 cached", last[1])
    assert re.match(r"C  PREFILL\(9\)  slot 0  0 cached  <s> In ·a ·quiet ·village", last[2])
    assert "B ·sun     ####### ........." in last
    assert "C ·fox     ....... #########" in last


def test_the_picture_in_the_readme_is_what_is_printed(command: Command) -> None:
    (picture,) = re.findall(r"```\n(slot 0 .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    printed = iter(line.rstrip() for line in command("show", COLUMNS="200").stdout.splitlines())
    for line in filter(None, picture.splitlines()):
        assert line in printed, f"{line!r} is not printed, or not there"


def test_the_users_own_prompts_hand_over_a_slot_too(command: Command) -> None:
    done = command("show", *PROMPTS, "And")
    assert re.search(r"D takes slot 0, which A has left, .* the decodes of B and C$", done.stdout, re.MULTILINE)


def test_several_steps_in_one_call_with_a_cap_for_each_prompt(command: Command) -> None:
    done = command("show", *PROMPTS, "--step", "0,2-3", "--max-tokens", "9,2,1", "--max-num-seqs", 2)
    assert drawn_steps(done.stdout) == [0, 2, 3]
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[1:5] == ["slot 0   Aaaa", "slot 1   BbC", "waiting  11", "shown    ^ ^^"]


@pytest.mark.thorough
def test_a_prompt_ends_where_the_model_ends_it(command: Command) -> None:
    """The story of the embedded model is over long before 400 tokens are."""
    ended = command("show", "Once", "--max-tokens", 400, "--step", 0)
    assert ended.returncode == 0
    assert command("show", "Once", "--max-tokens", 400, "--step", 399).returncode == 2
    assert command("show", "Once", "--max-tokens", 400, "--step", 399, "--ignore-eos").returncode == 0


@pytest.mark.thorough
def test_one_step_on_the_terminal_as_a_page_and_as_a_picture(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html, png = tmp_path / "step.html", tmp_path / "step.png"
    options = ("--step", 1, "--max-num-seqs", 3, "--max-num-batched-tokens", 12, "--html", html, "--png", png)
    done = command("show", *PROMPTS, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nstep 1: total_q 10 fed, total_kv 12 cached: 10 queries over 22 keys\n" in done.stdout
    assert re.search(r"^A  decode\(1\) +slot 0  5 cached", done.stdout, re.MULTILINE)
    assert re.search(r"^C  PREFILL\(8\) +slot 2  4 cached +·village ·there ·lived", done.stdout, re.MULTILINE)
    assert re.search(r"^C ·Felix +\.{6} \.{4} #{12}$", done.stdout, re.MULTILINE)
    error = re.search(r"cpu differs by at most (\S+) of the largest output, over 4 attention calls", done.stdout)
    assert error is not None
    assert float(error[1]) < 1e-5
    page = html.read_text(encoding="utf-8")
    text = unescape(re.sub("<[^>]+>", "", page))
    same = text[text.index("the slots, step by step") :]
    assert [line.rstrip() for line in done.stdout.splitlines() if line] == [
        line.rstrip() for line in same.splitlines() if line
    ]
    assert "http" not in page
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_picture_of_two_steps(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert command("show", "--png", tmp_path / "steps.png").returncode == 0
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_run_without_a_joining_request_shows_a_mixed_step_or_else_its_last(command: Command) -> None:
    chunks = command("show", *PROMPTS, "--max-num-seqs", 3, "--max-num-batched-tokens", 12)
    assert drawn_steps(chunks.stdout) == [1]
    assert drawn_steps(command("show", "Once", "--max-tokens", 3).stdout) == [2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["x", "--step", "9", "--max-tokens", "4"],
            "inflight: the run has 4 steps, the first is 0: there is no step 9\n",
        ),
        (["x", ""], "inflight: prompt 1: the prompt is empty; it must have at least one character\n"),
        (["x", "--step", "-1"], "'-1' are no steps; give their numbers, such as 3, 2-4 or 1,3-5"),
        (["x", "--max-tokens", "4,0"], "'4,0' are no numbers of tokens"),
        (["x", "--max-tokens", "4,1"], "--max-tokens has 2 numbers for 1 prompt"),
        (["x", "--model", "/nowhere/at/all"], "there is no model folder '/nowhere/at/all'"),
        (["x", "--html", "/nowhere/at/all.html"], "the file '/nowhere/at/all.html' cannot be written"),
    ],
)
@pytest.mark.thorough("arguments2", "arguments3", "arguments4", "arguments5")
def test_a_mistake_of_the_caller_is_one_sentence_and_exit_code_2(
    refused: Command, arguments: list[str], sentence: str
) -> None:
    assert sentence in refused("show", *arguments).stderr


def test_a_model_without_a_tokenizer_is_reported(refused: Command, tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    assert "this model has no tokenizer" in refused("show", "x", "-m", tmp_path).stderr
