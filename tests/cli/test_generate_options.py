"""What `inflight generate` can ask of a request: structured output, log-probabilities, penalties, stop tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
GREEDY = ("--temperature", 0, "--max-tokens", 40)


def one(text: str) -> dict[str, Any]:
    (line,) = text.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.thorough
def test_the_output_follows_the_flag(command: Command, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]/')
    for flag, value, expected in (
        ("--json-schema", schema, r'\{\s*"age"\s*:\s*[0-9]\s*\}'),
        ("--json-schema", json.dumps(SCHEMA), r'\{\s*"age"\s*:\s*[0-9]\s*\}'),
        ("--regex", "[0-9]{4}", "[0-9]{4}"),
        ("--grammar", grammar, r"[0-9]\+[0-9]"),
        ("--grammar", grammar.read_text(), r"[0-9]\+[0-9]"),
    ):
        done = command("generate", "Once", flag, value, *GREEDY)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(expected, done.stdout.strip()), done.stdout
    done = command("generate", "Once", "--choice", "yes", "--choice", "no", *GREEDY)
    assert done.stdout.strip() in ("yes", "no")


def test_each_json_line_may_have_its_own_structure(command: Command) -> None:
    lines = [
        {"prompt": "Once", "structured_output": {"regex": "[0-9]{4}"}},
        {"prompt": "Once", "structured_output": {"json_schema": SCHEMA}},
        {"prompt": "Once", "structured_output": None, "max_tokens": 3},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    done = command("generate", "-q", "--choice", "yes", *GREEDY, stdin=stdin)
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert re.fullmatch("[0-9]{4}", texts[0])
    assert 0 <= json.loads(texts[1])["age"] <= 9
    assert texts[2] != "yes"


def test_log_probabilities_are_written_for_a_single_prompt_too(command: Command) -> None:
    line = one(command("generate", "-q", "Once upon", "--logprobs", 2, "--prompt-logprobs", 0, *GREEDY).stdout)
    assert len(line["logprobs"]) == len(line["token_ids"])
    for token_id, position in zip(line["token_ids"], line["logprobs"], strict=True):
        assert position[0]["token_id"] == token_id
        assert (position[0]["rank"], position[0]["logprob"] <= 0) == (1, True)
        assert len(position) == 2
    assert line["prompt_logprobs"][0] is None
    assert len(line["prompt_logprobs"]) == line["num_prompt_tokens"]


@pytest.mark.thorough
def test_penalties_bad_words_and_stop_tokens_reach_the_engine(command: Command) -> None:
    plain = one(command("generate", "-q", "--jsonl", "Once upon a time", *GREEDY).stdout)
    stop = plain["token_ids"][4]
    stopped = one(command("generate", "-q", "--jsonl", "Once upon a time", "--stop-token-id", stop, *GREEDY).stdout)
    assert stopped["stop_reason"] == stop
    word = plain["text"].split()[1]
    assert word.isalpha()
    without = one(command("generate", "-q", "--jsonl", "Once upon a time", "--bad-word", word, *GREEDY).stdout)
    assert word not in without["text"].split()
    for flag in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert one(command("generate", "-q", "--jsonl", "Once upon a time", flag, 2, *GREEDY).stdout) != plain


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["x", "--json-schema", "no/such.json"], "", "--json-schema: the file 'no/such.json' cannot be read"),
        (["x", "--regex", "a", "--choice", "b"], "", "regex and choice are given"),
        (["x", "--json-schema", "{"], "", "schema"),
        (["x", "--presence-penalty", "3"], "", "presence_penalty is 3.0; it must be a number from -2 to 2"),
        ([], '{"prompt": "x", "structured_output": "[0-9]"}', "line 1 of standard input: structured_output is '[0-9]'"),
        ([], '{"prompt": "x", "structured_output": {"rexeg": "a"}}', "did you mean 'regex'?"),
    ],
)
@pytest.mark.thorough("arguments0", "arguments1")
def test_a_mistake_is_one_sentence(refused: Command, arguments: list[str], stdin: str, sentence: str) -> None:
    assert sentence in refused("generate", *arguments, stdin=stdin).stderr


def test_speculation_is_an_option_of_the_engine_and_of_a_line(command: Command) -> None:
    """They have one name, and other values."""
    lines = [{"prompt": "Once upon"}, {"prompt": "Once upon", "speculation": False}]
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    texts = set()
    for option in ("auto", "off", "lookup"):
        done = command("generate", "-q", "--speculation", option, *GREEDY, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, "")
        texts |= {json.loads(line)["text"] for line in done.stdout.splitlines()}
    assert len(texts) == 1
