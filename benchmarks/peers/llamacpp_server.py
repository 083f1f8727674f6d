"""Runner: llama.cpp's own server, over HTTP on the loopback interface, with token ids as prompts.

Answers are not streamed, so that reading them costs the server's cores nothing; the time of the first token follows
from the timings in each answer. Standard library only.
"""

import atexit
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Model, RunnerError, Settings, Times, serve
from benchmarks.workloads import Request

SERVER = Path(sys.prefix, "build", "bin", "llama-server")
MAX_START_SECONDS = 120
NGRAM, DRAFTED = 4, 5
"""Tokens of the n-grams that are looked up, and draft tokens of a draft model. Of all kinds of n-grams ngram-mod is the
fastest here; with the defaults, 24 and 3, all are slower."""


class Server:
    """A `llama-server` that is a child of this process and ends with it."""

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        context = settings.num_slots * (-(-settings.max_model_len // 256) * 256)
        arguments = ["-np", settings.num_slots, "-c", context, "-t", settings.num_threads, "-tb", settings.num_threads]
        if "amx_int8" in Path("/proc/cpuinfo").read_text():
            arguments.append(
                "--no-repack"
            )  # with it, this version dies of a general protection fault on virtual machines
        if settings.speculation == "ngram":
            arguments += ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", NGRAM, "--spec-ngram-mod-n-min", 2]
        elif settings.speculation == "draft":
            arguments += ["--spec-type", "draft-simple", "-md", settings.draft_model, "--spec-draft-n-max", DRAFTED]
            arguments += ["-td", settings.num_threads, "-tbd", settings.num_threads]
        if settings.acceptance is not None:
            arguments += ["--spec-synth-rates", ",".join(f"{each:.4f}" for each in settings.acceptance_rates(DRAFTED))]
        self.options: dict[str, Any] = {
            "model": Path(settings.model).name,
            "arguments": " ".join(Path(each).name if "/" in each else each for each in map(str, arguments)),
            "sources": next(
                (path.name for path in Path(sys.prefix, "source").glob("llama_cpp_python-*[0-9]")), "unknown"
            ),
        }
        command = [SERVER, "-m", settings.model, "--host", "127.0.0.1", "--port", self._port, *arguments]
        self._process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL)
        atexit.register(self._end)
        self._wait_until_ready()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + MAX_START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RunnerError(f"llama-server ended with status {self._process.returncode} while it was loading")
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise RunnerError(f"llama-server was not ready after {MAX_START_SECONDS} s")

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self._ask, requests))

    def _ask(self, request: Request) -> Times:
        body = {
            "prompt": request.prompt,
            "n_predict": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        end = time.perf_counter()
        if response.status != 200:
            raise RunnerError(f"llama-server answered {response.status}: {answer}")
        return Times(answer["tokens_predicted"], end - answer["timings"]["predicted_ms"] / 1000, end)


def load(settings: Settings) -> Model:
    return Server(settings)


if __name__ == "__main__":
    os.environ["LLAMA_ARG_NO_WEBUI"] = "1"
    serve(load, modules=(), distributions=())
