"""`inflight show` as a user runs it."""

import re
from html import unescape
from pathlib import Path

import pytest
import torch

from inflight.execution.weights.panels import has_panels
from tests import zoo
from tests.command import Command

PROMPTS = ("Once upon a time", "One morning", "In a quiet village there lived a clever fox named Felix")


def test_one_step_on_the_terminal_as_a_page_and_as_a_picture(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html, png = tmp_path / "step.html", tmp_path / "step.png"
    options = ("--step", 1, "--max-num-batched-tokens", 12, "--html", html, "--png", png)
    done = command("show", *PROMPTS, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 1: total_q 10 fed, total_kv 12 cached: 10 queries over 22 keys\n")
    assert re.search(r"^A  decode\(1\) +slot 0  5 cached", done.stdout, re.MULTILINE)
    assert re.search(r"^C  PREFILL\(8\) +slot 2  4 cached +·village ·there ·lived", done.stdout, re.MULTILINE)
    assert re.search(r"^C ·Felix +\.{6} \.{4} #{12}$", done.stdout, re.MULTILINE)
    error = re.search(r"cpu differs by at most (\S+) of the largest output, over 4 attention calls", done.stdout)
    assert error is not None
    assert float(error[1]) < 1e-5
    page = html.read_text(encoding="utf-8")
    text = unescape(re.sub("<[^>]+>", "", page))
    same = text[text.index("step 1: total_q") :].rstrip()
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in same.splitlines()]
    assert "http" not in page
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not has_panels(torch.int8), reason="nothing is compiled on this CPU")
def test_a_compiled_model_can_be_shown(command: Command) -> None:
    done = command("show", "Once upon a time", "--step", 1, "--compile", "auto", "--quantization", "int8")
    assert done.returncode == 0
    assert "over 4 attention calls" in done.stdout


def test_fewer_slots_than_prompts_leave_some_waiting(command: Command) -> None:
    done = command("show", *PROMPTS, "--step", 2, "--max-num-seqs", 2)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].endswith("; 1 waiting")
    assert "C  " not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["x", "--step", "9", "--max-tokens", "4"],
            "inflight: the run has 4 steps, the first is 0: there is no step 9\n",
        ),
        (["x", ""], "inflight: prompt 1: the prompt is empty; it must have at least one character\n"),
        ([], "Missing argument 'PROMPTS...'"),
        (["x", "--step", "-1"], "-1 is not in the range"),
        (["x", "--model", "/nowhere/at/all"], "there is no model folder '/nowhere/at/all'"),
        (["x", "--html", "/nowhere/at/all.html"], "the file '/nowhere/at/all.html' cannot be written"),
    ],
)
def test_a_mistake_of_the_caller_is_one_sentence_and_exit_code_2(
    refused: Command, arguments: list[str], sentence: str
) -> None:
    assert sentence in refused("show", *arguments).stderr


def test_a_model_without_a_tokenizer_is_reported(refused: Command, tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    assert "this model has no tokenizer" in refused("show", "x", "-m", tmp_path).stderr
