"""What the live page asks a server for."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from inflight import AsyncLLM
from inflight.contracts.step.record import RecordTo
from inflight.server.live import history
from inflight.server.live.endpoint import STATIC
from tests.server.serving import RunningServer

TEXT = {"prompt": "Once upon a time", "temperature": 0}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(num_blocks=500, max_num_seqs=2, restart_delays=(0.0, 0.0))) as server:
        assert server.http.get("/v1/models").status_code == 200  # it is loaded
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    yield shared
    shared.is_ending = False
    shared.check_idle()
    shared.app.state.service.keeps_texts = False


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return once it is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end


@contextmanager
def messages_of(server: RunningServer) -> Iterator[Iterator[dict[str, Any]]]:
    """What an open page is told."""
    with server.http.stream("GET", "/live/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: "))


@contextmanager
def running_request(server: RunningServer, **body: Any) -> Iterator[str]:
    """The id of a request that runs until the block ends, and for a minute if it does not."""
    asked = TEXT | {"max_tokens": 900, "n": 64, "ignore_eos": True, "stream": True} | body
    with server.http.stream("POST", "/v1/completions", json=asked) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        reading = threading.Thread(target=lambda: [None for _ in lines])
        reading.start()
        yield request_id
        server.app.state.service.llm._calls[request_id].abort()
        reading.join(60)


def test_an_open_page_is_told_what_runs_by_the_names_that_clients_know(server: RunningServer) -> None:
    with messages_of(server) as messages:
        first = next(messages)
        assert len(first["engines"]["0"]["blocks"]) > 500  # in base 64
        with running_request(server) as request_id:
            for message in messages:
                (engine,) = message["engines"].values()
                if any(each[0] == request_id for each in engine["running"]) and engine["steps"]:
                    break
            assert all(span[1] == request_id for step in engine["steps"] for span in step["spans"])
            assert {work[1] for work in engine["work"]} == {request_id}
            assert message["latencies"]["to_first_token"][0] > 0
            with messages_of(server) as others:  # who comes later is told everything at once
                assert next(others)["engines"]["0"]["blocks"]
        assert any(not message["engines"]["0"]["running"] for message in messages)


def test_the_engine_is_watched_only_while_a_page_is_open(server: RunningServer) -> None:
    broadcast = server.view.broadcast
    with messages_of(server) as messages:
        next(messages)
        assert broadcast.is_watching
    wait_until(lambda: not broadcast.is_watching)
    assert broadcast._looking is None
    with messages_of(server) as messages:
        next(messages)


def test_pages_end_when_engines_cannot_be_watched_and_may_come_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ArithmeticError("told")

    with messages_of(server) as messages:
        next(messages)
        monkeypatch.setattr(server.view.broadcast, "_written", broken)
        assert len(list(messages)) < 10
    monkeypatch.undo()
    with messages_of(server) as messages:
        assert next(messages)["engines"]


def test_streams_end_when_the_server_is_about_to(server: RunningServer) -> None:
    with messages_of(server) as messages:
        next(messages)
        server.is_ending = True
        assert len(list(messages)) < 10


def test_a_request_is_described_without_its_text_unless_texts_are_logged(server: RunningServer) -> None:
    for shows in (False, True):
        server.app.state.service.keeps_texts = shows
        with running_request(server, top_k=5, seed=3) as request_id:
            path = f"/live/requests/{request_id}"
            wait_until(lambda path=path: server.http.get(path).json()["num_output_tokens"] > 2)  # type: ignore[misc]
            about = server.http.get(path).json()
            assert (about["max_tokens"], about["top_k"], about["seed"], about["n"]) == (900, 5, 3, 64)
            assert about["num_prompt_tokens"] > 2
            assert about["seconds_to_first_token"] <= about["seconds"]
            assert ("prompt" in about, "texts" in about) == (shows, shows)
            if shows:
                assert about["prompt"].strip() == TEXT["prompt"]
                assert len(about["texts"][0]) > 3
            else:
                assert "Once" not in json.dumps(about)
    answer = server.http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_running")


def test_other_settings_are_simulated_with_what_was_recorded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "NICENESS", 0)  # other tests keep the cores busy

    def simulated(**body: Any) -> httpx2.Response:
        return server.http.post("/live/simulate", json=body)

    with monkeypatch.context() as patched:
        patched.setattr(server.view, "_recorded_in", RecordTo(path="/nowhere/steps.jsonl"))
        assert simulated().json()["error"]["code"] == "not_recorded"
    with messages_of(server) as messages:
        next(messages)
        for number in range(4):
            server.complete(prompt=[7] * (20 + 10 * number), max_tokens=20, ignore_eos=True)
        for _ in messages:  # (what was recorded is written once a second)
            answer = simulated()
            if answer.status_code == 200 and answer.json()["as_set"]["num_output_tokens"] >= 80:
                break
        assert answer.json()["as_set"] == answer.json()["changed"]
        with monkeypatch.context() as patched:
            patched.setattr(server.view.simulating, "locked", lambda: True)
            assert simulated().status_code == 429
        changed = simulated(max_num_seqs=1, policy="priority", enable_prefix_caching=False).json()
        assert changed["as_set"]["num_cached_tokens"] > changed["changed"]["num_cached_tokens"] == 0
        refused = simulated(num_blocks=1)
        assert refused.status_code == 400
        assert "the whole cache can only serve" in refused.json()["error"]["message"]
        assert simulated(max_num_seqs=0).status_code == 400


def test_the_hour_and_the_model_are_told(server: RunningServer) -> None:
    server.complete(**TEXT, max_tokens=5)
    history = server.http.get("/live/history").json()
    assert sum(history["num_ended"]) >= 1
    assert history["whole"]["to_first_token"][0] > 0
    about = server.http.get("/live/about").json()
    assert (about["model"], about["num_engines"], about["can_chat"]) == ("inflight-demo", 1, True)
    assert about["config"]["scheduling"]["max_num_seqs"] == 2
    assert about["info"]["num_blocks"] == 500


def test_the_page_is_the_same_for_everybody_and_may_load_nothing_from_elsewhere(server: RunningServer) -> None:
    for path in ("/", "/docs", "/ui/app.js", "/ui/vendor/preact.js", "/ui/style.css"):
        answer = server.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert path in ("/", "/docs") or again.status_code == 304
    assert server.http.head("/").status_code == 200
    for outside in ("/ui/../endpoint.py", "/ui/%2e%2e/endpoint.py", "/ui/nothing.js", "/ui/"):
        assert server.http.get(outside).status_code == 404, outside
    own = [path for path in STATIC.rglob("*") if path.is_file() and path.parent.name != "vendor"]
    assert len(own) > 10
    for path in own:
        text = path.read_text(encoding="utf-8")
        assert "https://" not in text, path
        assert "innerHTML" not in text, path
        assert 'style="' not in text, path


def test_every_vendored_library_has_its_licence_and_version() -> None:
    vendor = STATIC / "vendor"
    versions = (vendor / "VERSIONS").read_text().splitlines()
    listed = {file for line in versions for file in line.partition(": ")[2].split(", ")}
    assert listed == {path.name for path in vendor.iterdir() if path.suffix in (".js", ".css")}
    for line in versions:
        name = line.split()[0]
        assert (vendor / f"{name}.LICENSE").read_text().strip()
