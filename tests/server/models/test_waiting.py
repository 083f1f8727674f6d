"""What clients see while models are loaded and unloaded, and when they cannot be."""

import json
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.engine import Engine
from tests.server.batches.jobs import COMPLETION, begin, content_of, finished, line
from tests.server.models.conftest import Gates
from tests.server.models.serving import RunningModels, events_of, expected, wait_for
from tests.server.serving import read_until, send

CHAT: Any = [{"role": "user", "content": "The fox"}]
KEEP_ALIVE = b": keep-alive"
STREAMS = [
    ("/v1/completions", {"prompt": "The fox", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/responses", {"input": "The fox", "max_output_tokens": 16}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
]


def last_error(path: str, event: dict[str, Any]) -> str:
    """The message of a stream's last event, which is an error in the form of the API."""
    if path == "/v1/responses":
        assert event["type"] == "error"
        assert event["sequence_number"] == 0
        return str(event["message"])
    assert (event.get("type") == "error") == (path == "/v1/messages")
    return str(event["error"]["message"])


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.thorough("messages")
def test_a_stream_is_kept_alive_while_its_model_is_loaded(
    folders: dict[str, str], gates: Gates, path: str, body: dict[str, Any]
) -> None:
    gate = gates.close("load", folders["red"])
    with RunningModels(folders) as server, server.connection() as streaming, server.connection() as plain:
        send(streaming, path, model="red", stream=True, **body)
        send(plain, path, model="red", **body)
        read = read_until(streaming, KEEP_ALIVE)
        assert read.startswith(b"HTTP/1.1 200")
        assert b"text/event-stream" in read
        read_until(streaming, KEEP_ALIVE)  # and again
        assert server.states["red"] == "loading"
        assert server.complete("green")["model"] == "green"  # others go on
        gate.set()
        events = events_of(read_until(streaming, b"\r\n0\r\n\r\n").decode())
        assert events
        assert "error" not in events[-1]
        answer = read_until(plain, b"}}")
        assert answer.startswith(b"HTTP/1.1 200")
        assert KEEP_ALIVE not in answer


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.thorough
def test_an_error_after_a_comment_is_the_last_event(
    folders: dict[str, str], gates: Gates, path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    gate, missing = gates.close("load", folders["red"]), str(tmp_path / "missing")
    other = gates.close("load", missing)
    wrong = {name: -1 if name.startswith("max") else value for name, value in body.items()}
    with RunningModels({**folders, "gone": missing}) as server:
        for model, given, opened, message in (
            ("red", wrong, gate, "-1"),  # refused by the model's own application
            ("gone", body, other, "there is no model folder"),
        ):
            with server.connection() as streaming:
                send(streaming, path, model=model, stream=True, **given)
                read_until(streaming, KEEP_ALIVE)
                opened.set()
                read = read_until(streaming, b"\r\n0\r\n\r\n").decode()
                assert message in last_error(path, events_of(read)[-1])


def test_a_client_that_leaves_while_it_waits_is_forgotten(folders: dict[str, str], gates: Gates) -> None:
    gate = gates.close("load", folders["red"])
    with RunningModels(folders) as server:
        with server.connection() as streaming, server.connection() as plain:
            send(streaming, "/v1/completions", model="red", stream=True, prompt="a")
            send(plain, "/v1/completions", model="red", prompt="a")
            read_until(streaming, KEEP_ALIVE)
            wait_for(lambda: server.num_waiting() == 2)
        wait_for(lambda: server.num_waiting() == 0)
        gate.set()
        wait_for(lambda: server.states["red"] == "loaded")  # the load goes on, for those who come next
        assert server.num_uses("red") == 0
        assert server.complete("red")["model"] == "red"
        aborted = ("inflight:http_requests_total", "POST", "red", "/v1/completions", "499")
        wait_for(lambda: server.samples.get(aborted) == 1.0)


@pytest.mark.thorough
def test_a_request_that_comes_while_its_model_is_unloaded_waits_for_the_next_load(
    folders: dict[str, str], gates: Gates
) -> None:
    with RunningModels(folders, max_loaded_models=1) as server, ThreadPoolExecutor(2) as pool:
        server.complete("red")
        gate = gates.close("stop", folders["red"])
        green = pool.submit(server.complete, "green")
        wait_for(lambda: server.states["red"] == "unloading")
        red = pool.submit(server.complete, "red")
        wait_for(lambda: server.num_waiting() == 2)
        gate.set()
        assert green.result()["model"] == "green"
        assert red.result()["model"] == "red"


@pytest.mark.thorough
def test_a_model_that_is_used_is_not_unloaded(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    step = Engine.step

    def held(self: Engine) -> Any:
        assert may_go_on.wait(60)
        return step(self)

    with RunningModels(folders, max_loaded_models=1) as server, server.connection() as streaming:
        server.complete("red")
        monkeypatch.setattr(Engine, "step", held)
        send(streaming, "/v1/completions", model="red", prompt=[5], max_tokens=20, ignore_eos=True, stream=True)
        read_until(streaming, KEEP_ALIVE)
        with ThreadPoolExecutor(2) as pool:
            green = pool.submit(server.complete, "green")
            wait_for(lambda: server.num_waiting() == 1)
            red = pool.submit(server.complete, "red")  # which has to wait for its turn now
            wait_for(lambda: server.num_waiting() == 2)
            assert server.states == {"red": "loaded", "green": "unloaded", "blue": "unloaded"}
            may_go_on.set()
            assert b"[DONE]" in read_until(streaming, b"[DONE]")
            assert green.result()["model"] == "green"
            assert red.result()["model"] == "red"


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_fails_its_own_requests(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders["red"], broken)
    (broken / "model.safetensors").write_bytes(b"nothing of the kind")
    with RunningModels({**folders, "broken": str(broken)}) as server:
        server.complete("green")
        with monkeypatch.context() as patch:
            now = time.monotonic()
            patch.setattr(server.served.pool, "_clock", lambda: now)  # a second, or the next request is a new try
            error = server.complete("broken", 503)["error"]
            assert error["code"] == "model_error"
            assert error["message"].startswith("the model could not be loaded: ")
            answer = server.http.post("/v1/completions", json={"model": "broken", "prompt": "a"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        card = server.http.get("/v1/models/broken").json()
        assert card["status"]["value"] == "unloaded"
        assert card["status"]["failed"] is True
        assert card["status"]["error"] in error["message"]
        assert server.complete("green")["model"] == "green"
        shutil.copyfile(Path(folders["red"]) / "model.safetensors", broken / "model.safetensors")
        wait_for(lambda: server.http.post("/v1/completions", json={"model": "broken", "prompt": "a"}).is_success)
        assert server.http.get("/v1/models/broken").json()["status"] == {"value": "loaded"}
        assert server.samples["inflight:model_load_failures_total", "broken"] == 1


@pytest.mark.thorough
def test_a_model_whose_engine_is_lost_is_reloaded(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise KeyError("lost")

    with RunningModels(folders) as server:
        for name in ("red", "green"):
            server.complete(name)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", broken)
            server.complete("red", 503)
            wait_for(lambda: server.states["red"] == "unloaded")
        assert server.states["green"] == "loaded"
        wait_for(lambda: server.http.post("/v1/completions", json={"model": "red", "prompt": "a"}).is_success)
        assert server.samples["inflight:engine_crashes_total", "red"] == 1


@pytest.mark.thorough
def test_a_load_that_takes_longer_than_a_request_may_take_goes_on_without_it(
    folders: dict[str, str], gates: Gates
) -> None:
    gate = gates.close("load", folders["red"])
    with RunningModels(folders, settings={"request_timeout": 0.01}) as server:
        assert server.complete("red", 504)["error"]["code"] == "timeout"
        gate.set()
        wait_for(lambda: server.states["red"] == "loaded")


@pytest.mark.thorough
def test_lines_of_batch_jobs_name_their_models(folders: dict[str, str], tmp_path: Path) -> None:
    models = {**folders, "gone": str(tmp_path / "gone")}
    names = ["red", "green", "blue", "red", "gone", "other"]
    options = {"prompt": "The fox", "max_tokens": 4, "temperature": 0}
    lines = [line(str(number), COMPLETION, model=name, **options) for number, name in enumerate(names)]
    lines.append(line("6", COMPLETION, **options))
    with RunningModels(models, max_loaded_models=1, settings={"batch_dir": str(tmp_path / "jobs")}) as server:
        job = finished(server.client, begin(server.client, content_of(lines)))
        assert (job.request_counts.completed, job.request_counts.failed) == (4, 3)
        texts = {}
        for each in server.client.files.content(job.output_file_id).text.splitlines():
            result = json.loads(each)
            texts[result["custom_id"]] = result["response"]["body"]["choices"][0]["text"]
        token_ids = server.post("/tokenize", model="red", prompt="The fox")["tokens"]
        assert texts == {str(number): expected(name, token_ids, 4) for number, name in enumerate(names[:4])}
        said = server.client.files.content(job.error_file_id).text
        for message in ("there is no model folder", "there is no model 'other'", "model is missing"):
            assert message in said
        assert server.samples["inflight:batch_requests_total", "", "completed"] == 4


def test_every_request_ends_when_the_server_drains(folders: dict[str, str], gates: Gates) -> None:
    gate = gates.close("load", folders["red"])
    with (
        RunningModels(folders, operator={"grace_period": 0.0}) as server,
        server.connection() as streaming,
        server.connection() as plain,
    ):
        send(streaming, "/v1/completions", model="red", prompt="a", stream=True)
        send(plain, "/v1/completions", model="red", prompt="a")
        read_until(streaming, KEEP_ALIVE)
        wait_for(lambda: server.num_waiting() == 2)
        server.surroundings.drain.begin()
        server.call(server.surroundings.drain.finish())
        assert read_until(plain, b"}}").startswith(b"HTTP/1.1 503")
        assert server.num_waiting() == 0
        gate.set()


def test_weights_are_reloaded_in_loaded_models(folders: dict[str, str]) -> None:
    with RunningModels(folders, engine={"in_process": False}) as server:
        server.complete("red")
        (red,) = server.served.pool.loaded().values()
        before = red.llm._client.sessions()[0]
        server.call(server.served.reload_weights())
        assert red.llm._client.sessions()[0] is not before
        assert server.states == {"red": "loaded", "green": "unloaded", "blue": "unloaded"}
        assert server.complete("red")["model"] == "red"


def test_nothing_of_an_unloaded_model_stays_in_memory(folders: dict[str, str]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with RunningModels(folders, max_loaded_models=1, engine={"in_process": False}) as server:
        server.post("/v1/chat/completions", model="red", messages=CHAT, tools=[tool], max_tokens=3)
        server.post("/v1/chat/completions", model="red", messages=CHAT, reasoning_effort="low", max_tokens=3)
        server.complete("red", logprobs=2)
        (red,) = server.served.pool.loaded().values()
        kept = [weakref.ref(red.llm), weakref.ref(red.llm.tokenizer), weakref.ref(red.app)]
        del red
        server.complete("green")
        wait_for(lambda: not any(reference() for reference in kept))
