"""`inflight serve` with several models, as an operator runs it."""

import json
import shutil
import signal
from pathlib import Path

import httpx2
import openai
import pytest

from inflight.demo_model import DEMO_MODEL
from tests.server.models.serving import wait_for
from tests.server.test_serve_command import served_at


@pytest.mark.thorough
def test_from_the_first_line_to_the_exit_code(tmp_path: Path) -> None:
    mine = shutil.copytree(DEMO_MODEL, tmp_path / "mine")
    keys = tmp_path / "keys"
    keys.write_text("sk-one")
    options = ("--max-loaded-models", "1", "--num-blocks", "200", "--log-format", "json", "--api-key-file", str(keys))
    with served_at(str(mine), f"other={DEMO_MODEL}", *options) as (process, name, url):
        assert name == "are"  # "mine, other are served at"
        with httpx2.Client(base_url=url, timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.post("/v1/completions", json={"model": "mine", "prompt": "a"}).status_code == 401
            assert client.get("/health").status_code == 200
            assert client.get("/").headers["location"] == "?model=mine"
            assert client.get("/", params={"model": "mine"}).status_code == 200
            assert client.get("/live/about", params={"model": "mine"}).status_code == 401
            if (maps := Path(f"/proc/{process.pid}/maps")).exists():
                assert "libtorch" not in maps.read_text()
        ask = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0)
        assert {card.id: card.status["value"] for card in ask.models.list()} == {  # type: ignore[attr-defined]
            "mine": "unloaded",
            "other": "unloaded",
        }
        for model in ("mine", "other", "mine"):
            stream = ask.completions.create(model=model, prompt="Once", max_tokens=3, stream=True)
            assert {chunk.model for chunk in stream} == {model}
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    logged = list(map(json.loads, errors.splitlines()))
    said = [line["message"] for line in logged if line["logger"] == "inflight.server"]
    assert sum(message.startswith("mine was loaded in ") for message in said) == 2
    assert said.count("unloading mine") == 2
    assert [line["model"] for line in logged if line["message"].startswith("POST ") and line["status"] == 200] == [
        "mine",
        "other",
        "mine",
    ]


@pytest.mark.thorough
def test_one_model_may_be_unloaded_when_it_is_idle() -> None:
    with served_at("--idle-unload", "0.05s", "--num-blocks", "200") as (process, name, url):
        assert name == "inflight-demo"
        with httpx2.Client(base_url=url, timeout=60) as client:
            for _ in range(2):
                answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
                assert answer.json()["usage"]["completion_tokens"] == 3
                wait_for(lambda: '"value":"unloaded"' in client.get("/v1/models").text)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
