"""`inflight serve` as an operator runs it: from its first line to its exit code."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest

from inflight import AsyncLLM
from inflight.cli import main
from inflight.cli.serve import listen, listen_at
from inflight.demo_model import DEMO_MODEL
from inflight.observe.recorder import read_recording
from inflight.server.operations.settings import OperatorSettings
from inflight.server.run import removing_sockets

READY = re.compile(r"(\S+) (?:is )?served at (http://127\.0\.0\.1:\d+)")


@contextmanager
def served(*options: str, **environment: str) -> Iterator[tuple["subprocess.Popen[str]", httpx2.Client]]:
    """The command, once it is ready, and a client of it."""
    with served_at(*options, **environment) as (process, _, url), httpx2.Client(base_url=url, timeout=60) as client:
        assert client.get("/v1/models").status_code in (200, 401)
        yield process, client


@contextmanager
def served_at(*options: str, **environment: str) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    """The command, once it is ready, the last word of what it serves, and its address."""
    command = [sys.executable, "-m", "inflight", "serve", "--port", "0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=os.environ | environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            lines = process.stderr if "json" in options else process.stdout  # a log for collectors has this line, too
            match = next(filter(None, map(READY.search, lines)), None)
            assert match, process.stderr.read()
            yield process, match[1], match[2]
        finally:
            process.kill()


def test_from_the_first_line_to_the_exit_code(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one  # mine\n")
    options = ("--served-model-name", "stories", "--api-key-file", str(keys), "--max-n", "2", "--log-format", "json")
    record = tmp_path / "run.jsonl"
    options += ("--grace-period", "100", "--record", str(record), "--record-size", "20K", "--record-files", "2")
    with served(*options, INFLIGHT_API_KEYS="sk-two") as (process, client):
        assert client.get("/health").status_code == 200
        assert client.get("/version").json()["version"]
        if (maps := Path(f"/proc/{process.pid}/maps")).exists():
            assert "libtorch" not in maps.read_text()  # only the engine's process needs it
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert client.get("/live/about").status_code == 401
        for path in ("/", "/docs", "/ui/app.js"):  # the page itself is the same for everybody
            assert client.get(path).status_code == 200
        client.headers["Authorization"] = "Bearer sk-two"
        keys.write_text("sk-three\n")
        process.send_signal(signal.SIGHUP)
        while client.get("/v1/models", headers={"Authorization": "Bearer sk-three"}).status_code == 401:
            pass
        assert client.get("/v1/models", headers={"Authorization": "Bearer sk-one"}).status_code == 401
        keys.write_text("")
        process.send_signal(signal.SIGHUP)
        for line in process.stderr or ():
            if "the API keys stay as they were" in line:
                break
        assert client.get("/v1/models", headers={"Authorization": "Bearer sk-three"}).status_code == 200
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("stories", 1024)
        for model in ("stories", "inflight-demo"):
            response = client.post("/v1/completions", json={"prompt": "Once", "model": model, "max_tokens": 3})
            assert response.json()["usage"]["completion_tokens"] == 3
            assert response.headers["x-request-id"]
        assert client.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 400
        metrics = client.get("/metrics").text
        cache = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",model_name="stories"'
        assert cache in metrics
        assert 'vllm:request_success_total{finished_reason="length",model_name="stories"} 2.0' in metrics
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            with client.stream("GET", "/live/events") as page:  # which holds up nothing
                seen = page.iter_lines()
                assert next(seen)
                process.send_signal(signal.SIGTERM)  # the running request is finished
                assert [line for line in lines if line][-1] == "data: [DONE]"
                assert len(list(seen)) > 0
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        logged = list(map(json.loads, errors.splitlines()))  # nothing but JSON
        assert any(line["message"].startswith("POST /v1/completions 200") for line in logged)
        assert "Traceback" not in errors
        assert not output
    assert {each.name for each in tmp_path.iterdir()} == {"keys", "run.jsonl", "run.jsonl.1"}
    older, newer = (read_recording(path).steps for path in (record.with_name("run.jsonl.1"), record))
    assert len(older) > 20
    steps = [each.step for each in (*older, *newer)]  # the newer file may have only just begun
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_what_libraries_print_is_json_in_a_log_of_json() -> None:
    program = (
        "import os, subprocess, sys, warnings\n"
        "from inflight.server.operations.logs import set_up_logging\n"
        "set_up_logging(as_json=True)\n"
        "print('to standard output'); warnings.warn('mind the gap'); os.write(2, b'half a line\\rand the rest')\n"
        "subprocess.run(['echo', 'a child'])\n"
        "raise KeyError('lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert not done.stdout
    assert {line["logger"] for line in lines} == {"inflight.printed"}
    said = [line["message"] for line in lines]
    for text in ("to standard output", "half a line", "a child", "KeyError: 'lost'"):
        assert any(text in each for each in said), text
    assert any("mind the gap" in each for each in said)


def test_a_model_that_cannot_be_served_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs in the tests' own process, but does not set up logging, which belongs to that process."""
    monkeypatch.setattr("inflight.entrypoints.async_llm.AsyncLLM", partial(AsyncLLM, in_process=True))
    monkeypatch.setattr("inflight.server.operations.logs.set_up_logging", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["inflight", "serve", "--port", "0", "--max-model-len", "100000"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    output, errors = capfd.readouterr()
    assert "max_model_len is 100000; this model accepts at most 1024" in errors
    assert "Traceback" not in errors
    assert not output


def test_an_address_that_cannot_be_bound_is_reported_in_one_sentence() -> None:
    command = [sys.executable, "-m", "inflight", "serve", "--port", "0", "--host", "192.0.2.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("cannot listen on 192.0.2.1, port 0: Cannot assign requested address\n")
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.thorough
def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs_or_for_as_long_as_is_asked() -> None:
    assert OperatorSettings().timeout_keep_alive >= 95
    with (
        served_at("--timeout-keep-alive", "1") as (_, _, url),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection,
    ):
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # up to where the server closes it
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" not in answer.lower()


def test_all_addresses_are_those_of_ipv4_too() -> None:
    try:
        listener = listen("::", 0, 60.0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        listener.accept()[0].close()


def test_a_port_in_use_is_noticed_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> AsyncLLM:
        raise AssertionError("nothing should be loaded")

    monkeypatch.setattr("inflight.entrypoints.async_llm.AsyncLLM", load)
    monkeypatch.setattr("inflight.server.operations.logs.set_up_logging", lambda **_: None)
    with socket.create_server(("127.0.0.1", 0)) as used:
        monkeypatch.setattr(sys, "argv", ["inflight", "serve", "--port", str(used.getsockname()[1])])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    assert "Address already in use" in capfd.readouterr().err


def test_several_hosts_have_one_port(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def serve_until_told(_1: object, _2: object, _3: object, listeners: list[socket.socket], *_: object) -> None:
        port = listeners[0].getsockname()[1]
        for host, listener in zip(("127.0.0.1", "127.0.0.2"), listeners, strict=True):
            with listener, socket.create_connection((host, port)):
                listener.accept()[0].close()

    monkeypatch.setattr("inflight.server.run.serve_until_told", serve_until_told)
    monkeypatch.setattr("inflight.server.operations.logs.set_up_logging", lambda **_: None)
    hosts = ("--host", "127.0.0.1", "--host", "127.0.0.2")
    monkeypatch.setattr(sys, "argv", ["inflight", "serve", "--port", "0", *hosts])
    main()
    monkeypatch.setattr(sys, "argv", ["inflight", "serve", "--uds", "any", *hosts])
    with pytest.raises(SystemExit):
        main()
    assert "--uds any and --host are given" in capfd.readouterr().err


def test_a_unix_socket_under_a_path_that_a_proxy_may_strip(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    command = [sys.executable, "-m", "inflight", "serve", "--uds", str(path), "--root-path", "/llm"]
    environment = os.environ | {"INFLIGHT_API_KEYS": "sk-one"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, env=environment, **pipes) as process,  # type: ignore[call-overload]
        httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://here", timeout=60) as client,
    ):
        try:
            assert f" is served at unix:{path}" in process.stdout.readline()
            with pytest.raises(OSError, match="in use"):
                listen_at(str(path))
            key = {"Authorization": "Bearer sk-one"}
            for prefix in ("/llm", ""):
                for page in ("/", "/docs", "/ui/app.js", "/health", "/metrics"):
                    assert client.get(prefix + page).status_code == 200, prefix + page
                assert client.get(f"{prefix}/v1/models").status_code == 401
                assert client.get(f"{prefix}/v1/models", headers=key).status_code == 200
                document = client.get(f"{prefix}/openapi.json", headers=key).json()
                assert document["servers"] == [{"url": "/llm"}]
                assert "/v1/models" in document["paths"]
                answer = client.post(f"{prefix}/v1/messages", headers=key, json={})
                assert answer.json()["type"] == "error"  # Anthropic's envelope
            assert client.get("/llm").headers["location"].endswith("/llm/")  # to which the page's links are relative
            assert client.get("/llm?model=a&b=%2F").headers["location"].endswith("/llm/?model=a&b=%2F")
            assert client.get("/llmx/v1/models", headers=key).status_code == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not path.exists()


def test_a_socket_that_another_server_has_bound_since_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_at(str(path)) as old:
        os.utime(path, (0, 0))  # the new one may have the same inode, but not the same time
        with removing_sockets([old]):
            old.close()
            new = listen_at(str(path))
    with new, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_folder_without_a_tokenizer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    monkeypatch.setattr("inflight.server.run.serve_until_told", lambda *_: None)
    monkeypatch.setattr("inflight.server.operations.logs.set_up_logging", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["inflight", "serve", str(tmp_path), "--port", "0"])
    main()
    assert "has no tokenizer: it takes and returns token ids only" in caplog.text


@pytest.mark.thorough
def test_the_command_can_be_ended_while_the_model_loads() -> None:
    command = [sys.executable, "-m", "inflight", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "loading inflight-demo" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_two_replicas_are_served_as_one_and_reloaded_on_a_signal(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "mine")
    record = tmp_path / "steps.jsonl"
    options = ("--no-ui", "--replicas", "2", "--routing", "round-robin", "--num-blocks", "200", "--record", str(record))
    with served(str(model), *options) as (process, client):
        assert process.stderr is not None
        for path in ("/", "/docs", "/ui/app.js", "/live/about", "/live/events"):
            assert client.get(path).status_code == 404, path

        def wait_for(text: str) -> None:
            assert process.stderr is not None
            assert any(text in line for line in process.stderr), f"the log ended before {text!r}"

        def ups() -> list[str]:
            up = r'inflight:engine_up\{engine="(\d)",model_name="mine"\} 1\.0'
            return re.findall(up, client.get("/metrics").text)

        def ask() -> str:
            body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            (choice,) = client.post("/v1/completions", json=body).json()["choices"]
            return str(choice["text"])

        while ups() != ["0", "1"]:
            pass
        texts = {ask() for _ in range(4)}
        metrics = client.get("/metrics").text
        for number in "01":
            assert f'inflight:engine_requests_total{{engine="{number}",model_name="mine"}} 2.0' in metrics
            assert f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",engine="{number}"' in metrics
        process.send_signal(signal.SIGUSR1)
        wait_for("was reloaded")
        texts |= {ask() for _ in range(4)}
        assert len(texts) == 1
        (model / "model.safetensors").write_bytes(b"cut short")
        process.send_signal(signal.SIGUSR1)
        wait_for("so the old one stays")
        assert {ask() for _ in range(4)} == texts
        assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    for number in range(2):  # each engine's own, of its second start
        assert len(list(read_recording(record.with_name(f"steps-{number}.jsonl")).arrivals)) == 4


def test_what_runs_before_the_engine_starts_imports_no_server() -> None:
    """The server is imported while the engine's process loads the model."""
    code = """
import sys
import inflight.cli.serve, inflight.server.operations.logs
print({"fastapi", "uvicorn", "pydantic", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set()\n", done.stderr
