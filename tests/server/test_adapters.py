"""Adapters are models of the server: clients ask for them by name, and operators may let clients load them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.demo_model import DEMO_MODEL
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import Operations
from tests.adapters.made import modules_of, write_adapter
from tests.server.serving import HELLO, RunningServer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    modules = modules_of(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), "q_proj", "down_proj")
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, modules, seed) for seed, name in enumerate(("tales", "jokes"))}


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str | None, str]:
    """What is said without HTTP."""
    llm = LLM(adapters=folders)
    params = SamplingParams(**GREEDY)
    names = (None, *folders)
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False, adapter=names)
    return {name: output.outputs[0].text for name, output in zip(names, outputs, strict=True)}


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[RunningServer]:
    llm = AsyncLLM(adapters={"tales": folders["tales"]}, num_blocks=2000)
    with RunningServer(llm, model_name="stories", allow_adapter_loading=True) as server:
        yield server


def test_an_adapter_is_a_model(server: RunningServer, folders: dict[str, str], expected: dict[str | None, str]) -> None:
    plain, adapted = server.client.models.list()
    assert (plain.id, plain.model_extra["parent"], plain.model_extra["root"]) == ("stories", None, "stories")
    assert (adapted.id, adapted.model_extra["parent"]) == ("tales", "stories")
    assert adapted.model_extra["root"] == folders["tales"]
    assert server.client.models.retrieve("tales") == adapted
    for name in (None, "tales"):
        answer = server.complete(prompt=PROMPT, model=name, **GREEDY)
        assert answer["choices"][0]["text"] == expected[name]
        assert answer["model"] == (name or "stories")
    stream = server.client.completions.create(
        prompt=PROMPT, model="tales", stream=True, temperature=0, max_tokens=10, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected["tales"]
    assert {chunk.model for chunk in chunks} == {"tales"}
    refused = server.http.post("/v1/completions", json={"prompt": "a", "model": "poems"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "there is no model 'poems'; this server has 'stories', 'tales'"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_every_endpoint_knows_adapters(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = server.http.post(path, json={**body, "model": "tales"})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "tales") == "tales"
    assert server.http.post(path, json={**body, "model": "poems"}).status_code == 404


def test_clients_load_and_unload(
    server: RunningServer, folders: dict[str, str], expected: dict[str | None, str]
) -> None:
    def post(path: str, **body: Any) -> tuple[int, str]:
        answer = server.http.post(f"/v1/{path}_lora_adapter", json=body)
        return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]

    assert post("load", lora_name="jokes", lora_path=folders["jokes"]) == (
        200,
        "Success: LoRA adapter 'jokes' added successfully.",
    )
    assert server.complete(prompt=PROMPT, model="jokes", **GREEDY)["choices"][0]["text"] == expected["jokes"]
    for body, status, message in (
        ({"lora_name": "jokes", "lora_path": folders["jokes"]}, 400, "there is an adapter 'jokes' already"),
        ({"lora_name": "stories", "lora_path": folders["jokes"]}, 400, "lora_name is 'stories', which is a name of"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "there is no folder /nowhere"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "y", "load_inplace": True}, 400, "load_inplace is True"),
    ):
        given_status, given_message = post("load", **body)
        assert given_status == status
        assert message in given_message
    assert post("unload", lora_name="jokes") == (200, "Success: LoRA adapter 'jokes' removed successfully.")
    assert post("unload", lora_name="jokes")[0] == 404
    assert server.http.post("/v1/completions", json={"prompt": "a", "model": "jokes"}).status_code == 404


@settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
@given(name=st.text(max_size=5), path=st.one_of(st.text(max_size=20), st.sampled_from(["~x/y", "~", ".", "/", "a/b"])))
def test_no_name_or_path_is_the_servers_fault(server: RunningServer, name: str, path: str) -> None:
    body = json.dumps({"lora_name": name, "lora_path": path})
    answer = server.http.post("/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_clients_load_only_adapters_that_the_operator_allows(folders: dict[str, str]) -> None:
    with RunningServer(AsyncLLM(adapters={}, in_process=True), model_name="stories") as server:
        for path in ("load", "unload"):
            body = {"lora_name": "jokes", **({"lora_path": folders["jokes"]} if path == "load" else {})}
            answer = server.http.post(f"/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == 403
            assert "--allow-adapter-loading is off" in answer.json()["error"]["message"]


def test_gateways_read_which_adapters_run_and_which_wait() -> None:
    async def no_stats(seconds: float) -> dict[int, None]:
        return {}

    metrics = Operations(OperatorSettings(), "stories", no_stats).metrics
    metrics.describe_adapters(64)
    for request_id, adapter in (("1", "tales"), ("2", "jokes"), ("3", None), ("4", "tales"), ("5", "poems")):
        metrics.started(request_id, 1, SamplingParams(), adapter)
    for request_id in ("1", "2"):
        metrics.produced(request_id, 1, 5.0)
    metrics.finished("5", None, "abort")
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    families = {each.name: each for each in text_string_to_metric_families(generate_latest(metrics.registry).decode())}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "max_lora": "64",
        "running_lora_adapters": "jokes,tales",
        "waiting_lora_adapters": "tales",
    }
    assert sample.value > 1.7e9
