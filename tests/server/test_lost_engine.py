"""A server whose engine cannot be restarted reports this and exits; until then it reports the engine's state."""

import logging
import os
import signal
import threading
from typing import Any

import httpx2
import pytest

from inflight import AsyncLLM, EngineGivenUpError
from inflight.cli.serve import listen
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.process.protocol import Load
from inflight.server.operations.settings import OperatorSettings
from inflight.server.run import serve_until_told
from inflight.server.serving.settings import ServerSettings


def test_a_server_whose_engine_is_given_up_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines: list[ProcessConnection] = []
    may_fail = threading.Event()

    def connect(load: Load) -> ProcessConnection:
        if engines:
            assert may_fail.wait(60)
            raise OSError("no process can be started")
        engines.append(ProcessConnection(load))
        return engines[0]

    monkeypatch.setattr("inflight.engine.fleet.ProcessConnection", connect)
    caplog.set_level(logging.INFO)
    llm = AsyncLLM(num_blocks=200, restart_delays=(0.0,))
    listener = listen("127.0.0.1", 0, 60.0)
    is_ready, errors = threading.Event(), list[Exception]()

    def serve() -> None:
        try:
            serve_until_told(llm, ServerSettings(), OperatorSettings(grace_period=100.0), [listener], is_ready.set)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert is_ready.wait(60)
    with httpx2.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
        assert client.get("/health").status_code == 200
        os.kill(engines[0].pid, signal.SIGKILL)
        counted = 'engine_crashes_total{model_name="inflight-demo"} %.1f'
        while counted % 0 in (metrics := client.get("/metrics").text):  # it is counted even though there is no engine
            pass
        assert counted % 1 in metrics
        assert client.get("/health").status_code == 503
    may_fail.set()
    thread.join(60)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, EngineGivenUpError)
    said: dict[str, list[Any]] = {}
    for record in caplog.records:
        said.setdefault(record.name, []).append(record.getMessage())
    ready, died, given_up = said["inflight.engine"]
    assert "LlamaForCausalLM, 3.3 million parameters" in ready
    assert "executor packed" in ready
    assert "context 1024 tokens; cache 3200 tokens" in ready
    assert died == "the engine was killed by SIGKILL; it can be started again in 0 s"
    assert "no process can be started" in given_up
    assert given_up.endswith("2 times in a row; giving up")
    assert any(each.startswith("this server ends: the engine has died 2 times") for each in said["inflight.server"])
