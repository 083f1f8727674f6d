"""`inflight race` and `inflight bench`, as a user runs them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from inflight.cli import app
from inflight.demo_model import DEMO_MODEL
from inflight.lessons import static_bench
from tests import zoo
from tests.command import Command

STORY = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_a_race_ends_with_a_table_a_page_and_a_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "race.html", tmp_path / "race.png"
    arguments = ["race", "--requests", "6", "--max-tokens", "12", "--max-num-seqs", "3", "--verbose"]
    done = CliRunner().invoke(app, [*arguments, "--html", str(page), "--png", str(picture)])
    assert done.exit_code == 0, done.output
    assert "All methods gave the same tokens." in done.stdout
    assert "slot 2 <- req 2 (" in done.stderr
    assert "--- barrier" in done.stderr
    assert re.search(r"^slot 0 <- req 0 \(12 token cap\): \d+ prompt tokens: \d+ \d+", done.stderr, re.MULTILINE)
    assert re.search(r"^slot 1: req 1 is done, (\d) of 12 tokens useful: \d+", done.stderr, re.MULTILINE)
    assert page.read_text().count("<svg") == 1
    assert picture.stat().st_size > 10_000


MESSAGE = {"role": "user", "content": "Tell me a story."}


def test_a_race_can_be_limited_to_some_methods() -> None:
    done = CliRunner().invoke(app, ["race", "--requests", "3", "--max-tokens", "4", "--method", "engine"])
    assert done.exit_code == 0, done.output
    assert "engine" in done.stdout
    assert "static" not in done.stdout


def test_texts_race_with_a_cap_for_each(command: Command, tmp_path: Path) -> None:
    lines = [{"prompt": "Once upon a time", "max_tokens": 3}, "One morning", {"messages": [MESSAGE]}, [5, 6, 7]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--file", tmp_path / "prompts.jsonl", "--max-tokens", 5, "--max-num-seqs", 2, "--verbose")
    done = command("race", "Long ago", *options)
    assert done.returncode == 0
    assert "All methods gave the same tokens." in done.stdout
    assert "slot 1 <- req 1 (3 token cap): 5 prompt tokens: 'Once upon a time'" in done.stderr
    assert done.stderr.count("slot 0 <- req 0 (5 token cap): 3 prompt tokens: 'Long ago'") == 4
    assert len(re.findall(r"req 1 is done, 3 (?:of 5 )?tokens.*: ', there was'", done.stderr)) == 4


def test_a_text_ends_where_the_model_ends_it(command: Command) -> None:
    done = command("race", "Once upon a time", "One morning", "--max-tokens", 400, "--verbose", "--method", "ragged")
    lengths = [int(number) for number in re.findall(r"is done, (\d+) tokens", done.stderr)]
    assert len(lengths) == 2
    assert max(lengths) < 400


def test_the_pictures_of_a_merge_and_of_a_filter_in_the_documentation_are_what_is_logged(command: Command) -> None:
    line, log = re.findall(r"```sh\n(inflight race [^`]*)```\n\n```\n([^`]*)```", STORY.read_text())[0]
    done = command(*shlex.split(line.replace("\\\n", " "))[1:])
    assert done.returncode == 0
    assert log in done.stderr
    assert "merge:" in log
    assert "filter:" in log


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["a", "b", "--max-tokens", "1,2,3"], "", "--max-tokens has 3 numbers for 2 prompts"),
        (["--max-tokens", "1,2"], "", "--max-tokens has 2 numbers for 1 prompt"),
        (["a", ""], "", "prompt 1: the prompt is empty"),
        (["-"], '{"prompt": "x", "temperature": 1}', "a race is greedy; besides a prompt it takes max_tokens, not"),
        (["-"], '{"prompt": "x", "max_tokens": -1}', "line 1 of standard input: max_tokens is -1"),
        (["-"], '{"url": "/v1/completions", "body": {}}', "besides a prompt it takes max_tokens"),
    ],
)
@pytest.mark.thorough("arguments0", "arguments1")
def test_a_mistake_is_one_sentence(refused: Command, arguments: list[str], stdin: str, sentence: str) -> None:
    assert sentence in refused("race", *arguments, stdin=stdin).stderr


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    arguments = ["race", "--requests", "2", "--max-tokens", "2", "--png", str(tmp_path / "no" / "race.png")]
    with pytest.raises(ValueError, match="cannot be written"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.thorough
def test_the_static_benchmark_runs_any_model_with_as_many_requests_as_asked_for(command: Command) -> None:
    done = command("bench", "static", "-m", DEMO_MODEL, "--rounds", 2, "--requests", 3)
    assert done.returncode == 0
    assert "3 requests, 100 new tokens for every eighth" in done.stdout
    assert re.search(r"^model\.generate .* equal", done.stdout, re.MULTILINE)
    for name in ("shared prefix", "engine, cold", "engine, warm", "engine, disk"):
        assert re.search(rf"^{name} .* equal", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^round [12] of 2: \S+", done.stderr, re.MULTILINE)) == 2 * (5 + 5)


def test_a_benchmark_tells_of_every_token_of_every_round() -> None:
    comparison = static_bench.compare_rungs(zoo.build("llama"), num_requests=3)
    told: list[int] = []
    static_bench.measure(comparison, 2, lambda line: None, told.append)
    assert comparison.num_tokens == 120
    assert sum(told) == 2 * 5 * 120
    assert len(told) > 2 * 5 * 20, "it is told as they are generated"
