"""The live page of a server with several models: what it asks for. `tests/browser` opens it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.models.serving import RunningModels, wait_for


@contextmanager
def messages_of(server: RunningModels, model: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What an open page is told."""
    with server.http.stream("GET", "/live/events", params={"model": model}) as response:
        assert response.status_code == 200
        yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: "))


def test_the_page_begins_with_the_model_that_was_used_last(folders: dict[str, str]) -> None:
    with RunningModels(folders) as server:
        for path in ("/", "/docs"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.headers["location"]) == (307, "?model=red")
            assert "<div id=" in server.http.get(path, params={"model": "red"}).text
        assert server.http.get("/ui/app.js").status_code == 200
        for name in ("green", "blue", "green"):
            server.complete(name)
        assert server.http.get("/").headers["location"] == "?model=green"


def test_each_model_is_shown_by_its_name_while_it_is_loaded(folders: dict[str, str]) -> None:
    with RunningModels(folders) as server:
        answer = server.http.get("/live/about", params={"model": "red"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_loaded")
        assert server.states["red"] == "unloaded"  # looking loads nothing
        for name in ("red", "green"):
            server.complete(name)
        for name in ("red", "green"):
            assert server.http.get("/live/about", params={"model": name}).json()["model"] == name
            assert server.http.get("/live/history", params={"model": name}).is_success
            with messages_of(server, name) as messages:
                assert next(messages)["engines"]["0"]
        assert server.http.get("/live/about").status_code == 400
        assert server.http.get("/live/about", params={"model": "other"}).status_code == 404
        assert server.http.post("/live/simulate", json={"max_num_seqs": 0}, params={"model": "red"}).status_code == 400
        paths = server.http.get("/openapi.json").json()["paths"]
        assert {"/live/about", "/live/simulate"} <= set(paths)


def test_an_open_page_keeps_no_model_loaded_and_ends_with_it(folders: dict[str, str]) -> None:
    with RunningModels(folders, max_loaded_models=1) as server:
        server.complete("red")
        with messages_of(server, "red") as messages:
            next(messages)
            assert server.num_uses("red") == 0
            server.complete("green")
            for _ in messages:
                pass
        wait_for(lambda: server.http.get("/live/about", params={"model": "red"}).status_code == 503)


def test_a_page_that_is_open_does_not_hold_up_the_end(folders: dict[str, str]) -> None:
    with RunningModels(folders) as server:
        server.complete("red")
        with messages_of(server, "red") as messages:
            next(messages)
            server._server.should_exit = True
            for _ in messages:
                pass


def test_a_server_may_have_no_page(folders: dict[str, str]) -> None:
    with RunningModels(folders, has_page=False) as server:
        server.complete("red")
        for path in ("/", "/docs", "/ui/app.js", "/live/about?model=red", "/live/events?model=red"):
            assert server.http.get(path).status_code == 404, path
