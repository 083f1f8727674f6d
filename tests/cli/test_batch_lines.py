"""OpenAI's batch files through `inflight generate`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command
from tests.interrupts import interrupted_after_a_line

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "some-model", **body}}


def as_lines(*requests: Any) -> str:
    return "".join(json.dumps(each) + "\n" for each in requests)


def test_every_line_is_answered_in_openais_form_and_in_order(command: Command, tmp_path: Path) -> None:
    file, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    hello = [{"role": "user", "content": "Tell me a story."}]
    file.write_text(
        as_lines(
            request("long", COMPLETION, prompt="Once upon a time", **GREEDY | {"max_tokens": 40}),
            request("chat", CHAT, messages=hello, **GREEDY),
            request("schema", CHAT, messages=hello, response_format={"type": "json_object"}, max_tokens=2, n=2),
            request("wrong", CHAT, messages=hello, temperature=-1),
            request("nowhere", "/v1/moderations", input="x"),
            request("other", COMPLETION, prompt=[5, 6, 7], **GREEDY) | {"body": {"prompt": [5, 6], "model": "b"}},
        )
    )
    done = command("generate", "-f", file, "-o", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert "6/6" in done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["long", "chat", "schema", "wrong", "nowhere", "other"]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 200, 400, 404, 200]
    assert len({line["id"] for line in lines}) == 6
    assert {tuple(line) for line in lines} == {("id", "custom_id", "response", "error")}
    bodies = [line["response"]["body"] for line in lines]
    assert [body.get("object") for body in bodies[:3]] == ["text_completion", "chat.completion", "chat.completion"]
    assert [len(bodies[2]["choices"]), bodies[2]["choices"][0]["message"]["content"].lstrip()[:1]] == [2, "{"]
    assert bodies[3]["error"]["param"] == "temperature"
    plain = command("generate", "Once upon a time", "--temperature", 0, "--max-tokens", 40)
    assert bodies[0]["choices"][0]["text"] == plain.stdout.removesuffix("\n")


@pytest.mark.thorough
def test_an_interrupt_writes_the_finished_answers(tmp_path: Path) -> None:
    file = tmp_path / "batch.jsonl"
    short, long = ({"prompt": "Once", "max_tokens": count, "ignore_eos": True} for count in (2, 900))
    bodies = [short, long, short, *[long] * 300]
    file.write_text(as_lines(*(request(str(number), COMPLETION, **body) for number, body in enumerate(bodies))))
    command = [sys.executable, "-m", "inflight", "generate", "-f", str(file), "--quiet", "--max-num-seqs", "4"]
    printed, errors = interrupted_after_a_line(command, os.environ | {"OMP_NUM_THREADS": "1"})
    ended = [json.loads(line)["custom_id"] for line in printed.splitlines()]
    assert ended[0] == "0"
    assert len(ended) < 303
    assert errors.strip() == "inflight: interrupted"


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (
            [],
            as_lines(request("a", CHAT) | {"method": "GET"}),
            "line 1 of standard input must have a custom_id of 1 to 512 characters, the",
        ),
        ([], as_lines(request("a", CHAT) | {"priority": 1}), "it has ['priority']"),
        ([], as_lines({"custom_id": "a", "body": []}), "a body that is an object"),
        ([], as_lines(request("a", CHAT, stream=True)), "line 1 of standard input: a request of a batch cannot stream"),
        ([], as_lines(request("a", CHAT), {"prompt": "x"}), "line 2 of standard input is a prompt"),
        (["--temperature", "0"], as_lines(request("a", CHAT)), "temperature is given as an option"),
        (["--chat"], as_lines(request("a", CHAT)), "chat is given as an option"),
    ],
)
def test_a_mistake_is_one_sentence(refused: Command, arguments: list[str], stdin: str, sentence: str) -> None:
    done = refused("generate", *arguments, stdin=stdin)
    assert sentence in done.stderr
    assert done.stdout == ""


def test_a_model_that_cannot_be_loaded_is_one_sentence(refused: Command) -> None:
    done = refused("generate", "-m", "/nowhere/at/all", stdin=as_lines(request("a", CHAT)))
    assert "there is no model folder '/nowhere/at/all'" in done.stderr
