"""`inflight bench serve` as a user runs it, against a server on a real socket, and once in its own process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from tests.command import Command, Done
from tests.loadtest.fake_server import Exchange, FakeServer, refuse
from tests.ports import unused_port

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


Bench: TypeAlias = Callable[..., Done]


@pytest.fixture
def bench(command: Command, server: FakeServer) -> Bench:
    """The command against the server, in the tests' own process."""

    def run(*arguments: object, **variables: str) -> Done:
        return command("bench", "serve", "--base-url", server.url, *arguments, **variables)

    return run


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().in_thread() as server:
        yield server


@pytest.mark.thorough
def test_a_readable_report_and_a_picture(server: FakeServer, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    command = [
        sys.executable, "-m", "inflight", "bench", "serve", "--base-url", server.url, "--num-requests", "20",
        "--random-input-len", "12", "--random-output-len", "uniform:2:6", "--request-rate", "500",
        "--goodput", "ttft:600000,tpot:600000", "--goodput", "e2e:600000", "--png", picture,
        "--server-pid", str(os.getpid()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20 of 20 completed" in done.stdout
    assert "(100.0% of all met the objectives)" in done.stdout
    assert "server's CPU time" in done.stdout
    assert {line.split()[0] for line in done.stdout.splitlines()[-6:]} == {
        "milliseconds", "TTFT", "TPOT", "ITL", "E2E", "sent",
    }  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    asked = server.bodies[1:]
    assert {len(body["prompt"]) for body in asked} == {12}
    assert {body["max_tokens"] for body in asked} <= set(range(2, 7))
    assert {(body["model"], body["temperature"], body["ignore_eos"]) for body in asked} == {("fake-1", 0.0, True)}


def test_a_report_as_json_with_every_request(bench: Bench, server: FakeServer) -> None:
    done = bench(
        "--workload", "W3", "--model", "mine", "--seed", 4, "--extra-body", '{"top_k": 5}', "--json",
        "--temperature", 0.5, "--max-concurrency", 4, "--api-key", "secret",
    )  # fmt: skip
    content = json.loads(done.stdout)
    report, requests = content["report"], content["requests"]
    assert (report["num_completed"], report["num_input_tokens"], report["num_output_tokens"]) == (32, 32 * 528, 1024)
    assert report["peak_concurrency"] <= 4
    assert len(requests) == 32
    for request in requests:
        assert request["scheduled"] <= request["sent"] <= request["token_times"][0] <= request["finished"]
    run = content["run"]
    assert (run["model"], run["workload"], run["request_rate"]) == ("mine", "W3", "inf")
    assert "secret" not in done.stdout
    assert {exchange.headers["Authorization"] for exchange in server.exchanges} == {"Bearer secret"}
    assert {(body["top_k"], body["temperature"]) for body in server.bodies} == {(5, 0.5)}


def test_prompts_from_a_file_and_from_a_trace(bench: Bench, server: FakeServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n{"prompt": "two", "output_tokens": 3}\n')
    done = bench("--prompt-file", prompts, "--endpoint", "chat", "--num-requests", 3, "--request-rate", 1e4)
    assert "3 of 3 completed" in done.stdout
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for body in server.bodies[1:]]
    assert sorted(asked) == [("one", 100), ("one", 100), ("two", 3)]

    server.exchanges.clear()
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 3.01, "prompt_tokens": 5, "output_tokens": 2}\n{"timestamp": 3, "prompt": "p"}\n')
    done = bench("--trace", trace, "--prompt-kind", "words", "--random-output-len", 7)
    assert "2 of 2 completed" in done.stdout
    first, second = server.bodies[1:]
    assert (first["prompt"], first["max_tokens"]) == ("p", 7)
    assert (len(second["prompt"].split()), second["max_tokens"]) == (5, 2)


def test_failures_are_reported_by_reason_and_a_run_without_answers_fails(bench: Bench, server: FakeServer) -> None:
    async def behave(exchange: Exchange) -> web.Response | None:
        if len(server.exchanges) % 2 == 0:
            return refuse(429, "[later] please")
        await exchange.answer()
        return None

    server.behave = behave
    done = bench("--num-requests", 10, "--random-output-len", 2)
    assert done.returncode == 0
    assert "5 of 10 completed" in done.stdout
    assert "failed (5)         HTTP 429: [later] please" in done.stdout

    async def refuse_all_but_the_first(exchange: Exchange) -> web.Response | None:
        if len(server.exchanges) > 1:
            return refuse(429, "later")
        await exchange.answer()
        return None

    server.behave = refuse_all_but_the_first
    server.exchanges.clear()
    done = bench("--num-requests", 10, "--json")
    assert done.returncode == 1
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    assert (report["num_completed"], report["failures"], report["ttft"]) == (0, {"HTTP 429: later": 10}, None)


def test_the_key_can_come_from_the_environment(bench: Bench, server: FakeServer) -> None:
    async def behave(exchange: Exchange) -> web.Response | None:
        if exchange.headers.get("Authorization") != "Bearer from outside":
            return refuse(401, "wrong key")
        await exchange.answer()
        return None

    server.behave = behave
    assert bench("--num-requests", 2, OPENAI_API_KEY="from outside").returncode == 0
    done = bench("--num-requests", 2, OPENAI_API_KEY="another")
    assert (done.returncode, done.stdout) == (1, "")
    assert "HTTP 401: wrong key" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workload", "W1", "--trace", "x"], "--trace cannot be given with --workload"),
        (["--request-rate", "3", "--trace", "x"], "--request-rate cannot be given with --trace"),
        (["--prompt-file", "x", "--prefix-len", "0"], "--prefix-len cannot be given with --prompt-file"),
        (["--burst-size", "3"], "--burst-size needs a --request-rate"),
        (["--trace", "missing.jsonl"], "the file 'missing.jsonl' cannot be read"),
        (["--goodput", "ttft=3"], "such as ttft:500"),
        (["--random-input-len", "many"], "the lengths are 'many'"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--base-url", "localhost"], "it must be a URL"),
        (["--server-pid", "999999999"], "there is no process 999999999"),
        (["--request-rate", "nan"], "the request rate is nan; it must be above 0"),
    ],
)
def test_a_bad_argument_is_reported_in_one_sentence(
    refused: Command, server: FakeServer, arguments: list[str], complaint: str
) -> None:
    done = refused("bench", "serve", "--base-url", server.url, *arguments)
    assert complaint in done.stderr
    assert done.stdout == ""


def test_a_missing_server_is_reported(command: Command) -> None:
    with unused_port() as port:
        done = command("bench", "serve", "--base-url", f"http://127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"http://127.0.0.1:{port}: cannot connect" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--num-requests", 50, "--request-rate", 0.25), "inflight: requests arrive for about 3 min\n"),
        (("--num-requests", 50, "--request-rate", 10), ""),
        ((), ""),
        (("--trace", "trace.jsonl"), "inflight: requests arrive for about 70 s\n"),
    ],
)
def test_how_long_requests_arrive_is_said_if_that_is_known(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text("".join(f'{{"timestamp": {time}, "prompt": "p"}}\n' for time in (100, 30, 60)))
    with unused_port() as port:
        done = command("bench", "serve", "--base-url", f"http://127.0.0.1:{port}", *options)
    assert done.stderr.startswith(f"{said}Error: ")
