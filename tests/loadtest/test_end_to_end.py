"""A real server with the embedded model, under load and in a chat."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.command import Command

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The server's address and process."""
    command = [sys.executable, "-m", "inflight", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield found[0], process.pid
        finally:
            process.terminate()


@pytest.mark.parametrize(("endpoint", "processes"), [("completions", 1), ("completions", 3), ("chat", 1)])
@pytest.mark.thorough("chat")
def test_a_load_is_answered_completely_and_the_report_has_the_cpu_time_of_the_engine(
    command: Command, server: tuple[str, int], endpoint: str, processes: int
) -> None:
    url, pid = server
    done = command(
        "bench", "serve", "--base-url", url, "--endpoint", endpoint, "--num-requests", 40, "--random-input-len", 20,
        "--random-output-len", "uniform:1:16", "--request-rate", 100, "--server-pid", pid, "--json",
        "--processes", processes, "--max-concurrency", 20,
    )  # fmt: skip
    content: dict[str, Any] = json.loads(done.stdout)
    report, requests = content["report"], content["requests"]
    assert (done.returncode, report["num_completed"], report["failures"]) == (0, 40, {})
    assert report["num_counted"] == 40
    assert report["num_output_tokens"] == report["num_output_tokens_asked"]
    if endpoint == "completions":
        assert {request["num_prompt_tokens"] for request in requests} == {20}
    assert report["server_cpu_seconds"] > 0
    assert [request["scheduled"] for request in requests] == sorted(request["scheduled"] for request in requests)
    for request in requests:
        assert request["scheduled"] <= request["sent"] <= request["finished"]
        assert request["token_times"] == sorted(request["token_times"])
        assert len(request["token_times"]) <= request["num_output_tokens"]


def test_a_chat_over_http_matches_the_library(command: Command, server: tuple[str, int]) -> None:
    url, _ = server
    said = ["Tell me a story about a fox.", "Tell me another one."]
    done = command("chat", "--url", url, "--temperature", 0, "--max-tokens", 40, stdin="\n".join(said))
    llm, messages, expected = LLM(), list[dict[str, str]](), ""
    for line in said:
        messages.append({"role": "user", "content": line})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        expected += f"{output.outputs[0].text}\n"
    assert (done.returncode, done.stdout) == (0, expected)
