"""Models that have options and adapters of their own, behind one port."""

import json
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.server.responses.store import ResponseStore
from tests.adapters.made import modules_of, write_adapter
from tests.server.models.serving import RunningModels, expected, plain

PROMPT = list(range(5, 15))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tmp_path_factory.mktemp("tales"), modules_of(plain("green"), "q_proj", "down_proj"), seed=0)


def test_each_model_has_options_and_adapters_of_its_own(folders: dict[str, str], tales: str, tmp_path: Path) -> None:
    own = {"red": {"max_model_len": 64, "max_n": 2}, "green": {"adapters": {"tales": tales}}}
    (adapted,) = LLM(folders["green"], adapters={"tales": tales}).generate(
        [PROMPT], SamplingParams(**GREEDY), use_tqdm=False, adapter="tales"
    )
    text = adapted.outputs[0].text
    assert text != expected("green", PROMPT, 8)
    store = str(tmp_path / "responses.db")
    settings = {"batch_dir": str(tmp_path / "jobs"), "response_store": store}
    with RunningModels(folders, own_options=own, max_loaded_models=2, settings=settings) as server:
        for name in folders:
            answer = server.complete(name, prompt=PROMPT, **GREEDY)
            assert answer["choices"][0]["text"] == expected(name, PROMPT, 8)
        assert server.states == {"red": "unloaded", "green": "loaded", "blue": "loaded", "tales": "loaded"}
        answer = server.complete("tales", prompt=PROMPT, **GREEDY)
        assert (answer["model"], answer["choices"][0]["text"]) == ("tales", text)
        cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
        assert {name: card["parent"] for name, card in cards.items()} == {**dict.fromkeys(folders), "tales": "green"}
        assert server.http.get("/v1/models/tales").json() == cards["tales"]
        assert (cards["red"]["max_model_len"], cards["blue"]["max_model_len"]) == (64, 1024)

        refused = server.complete("red", status=400, prompt=PROMPT, n=3)
        assert "n is 3; this server takes at most 2" in refused["error"]["message"]
        assert len(server.complete("blue", prompt=PROMPT, n=3)["choices"]) == 3
        unknown = server.complete("poems", status=404)["error"]["message"]
        assert unknown == "there is no model 'poems'; this server has 'red', 'green', 'blue', 'tales'"

        lines = [
            {
                "custom_id": name,
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": name, "prompt": PROMPT, **GREEDY},
            }
            for name in ("tales", "green", "red")
        ]
        client = server.client
        file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        job = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while job.status in ("validating", "in_progress", "finalizing"):
            job = client.batches.retrieve(job.id)
        assert job.output_file_id is not None
        answers = [json.loads(line) for line in client.files.content(job.output_file_id).text.splitlines()]
        texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
        assert texts == {"tales": text, "green": expected("green", PROMPT, 8), "red": expected("red", PROMPT, 8)}
        assert any(name == "vllm:lora_requests_info" and "green" in labels for name, *labels in server.samples)
        server.wait_until_unused()
    ResponseStore(store).close()  # the server has closed it


def test_wrong_options_are_said_at_the_start(folders: dict[str, str]) -> None:
    for own, message in (
        ({"max_n": 0}, "max_n is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"port": 1}, "AsyncLLM has no option 'port'"),
        ({"adapters": {"blue": "x"}}, "the adapter 'blue' has the name of another model"),
    ):
        with pytest.raises(ValueError, match=message):
            RunningModels(folders, own_options={"red": own})
