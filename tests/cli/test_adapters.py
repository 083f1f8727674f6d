"""Adapters on the command line: one for all prompts, or some as models of a server."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from inflight import LLM, SamplingParams
from inflight.demo_model import DEMO_MODEL
from tests.adapters.made import modules_of, write_adapter
from tests.command import Command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    modules = modules_of(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), "q_proj", "down_proj")
    return write_adapter(tmp_path_factory.mktemp("adapter"), modules, seed=0)


@pytest.mark.thorough
def test_all_prompts_have_the_adapter(command: Command, folder: str, tmp_path: Path) -> None:
    llm = LLM(adapters={"a": folder})
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [each.outputs[0].text for each in llm.generate(["Once", "The fox"], params, use_tqdm=False, adapter="a")]
    sampling = ("--temperature", 0, "--max-tokens", 10, "--adapter", folder)
    assert command("generate", "Once", *sampling).stdout == expected[0] + "\n"
    lines = command("generate", "Once", "The fox", *sampling).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == expected
    chat = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False, adapter="a")[0].outputs[0].text
    assert chat.strip() in command("chat", *sampling, stdin="Hello\n").stdout
    requests = tmp_path / "requests.jsonl"
    bodies = [{"model": name, "prompt": "Once", "temperature": 0, "max_tokens": 10} for name in ("a", "any")]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    requests.write_text("\n".join(lines))
    done = command("batch", requests, "-o", tmp_path / "results.jsonl", "--adapter", f"a={folder}", "-q")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["response"]["body"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [answer["choices"][0]["text"] == expected[0] for answer in answers] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--adapter", "tales"), "'tales' is no adapter; give NAME=PATH"),
        (("serve", "--adapter", "a=x", "--adapter", "a=y"), "there are two adapters 'a'"),
        (("serve", "--adapter", "inflight-demo=x"), "the adapter 'inflight-demo' has a name of the model"),
        (("serve", "--allow-adapter-loading"), "--allow-adapter-loading needs API keys: --api-key-file"),
        (("generate", "Once", "--adapter", "./nowhere"), "there is no folder ./nowhere"),
        (("chat", "--url", "http://127.0.0.1:1", "--adapter", "x"), "--adapter is for an engine in this process"),
    ],
)
def test_what_is_wrong_is_said(command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments, stdin="")
    assert done.returncode != 0
    assert message in done.stderr
