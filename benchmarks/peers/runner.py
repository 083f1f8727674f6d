"""`compare.py`'s half of the protocol: starts a runner, talks to it, pauses it while others run, and ends it.

While other runners are measured, a runner and all processes that it started are stopped (SIGSTOP), so that its spinning
or polling threads do not disturb the measurement.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import REPOSITORY
from benchmarks.peers.protocol import Loaded, Measured, RunnerError, Settings, measured_from, processor_seconds
from benchmarks.workloads import Request

MAX_SECONDS = 1800
"""The time limit for loading, and for one run."""
SECONDS_TO_END = 10


class Runner:
    """A runner process, loaded and stopped between its turns. A context manager: it never outlives its `with`.

    Args:
        command: starts the process.
        settings: what it loads, and how.
        log: a file for everything that it prints.

    Every method raises `RunnerError` if the runner ends or fails.
    """

    def __init__(self, command: Sequence[str], settings: Settings, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(settings.num_threads)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(command),
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        try:
            self.loaded = Loaded(**self._ask(dataclasses.asdict(settings)))
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, requests: Sequence[Request]) -> Measured:
        """Run all requests at once; check that each got exactly the requested number of tokens."""
        start, before = time.monotonic(), processor_seconds(self._process.pid)
        self._signal(signal.SIGCONT)
        measured = measured_from(self._ask([dataclasses.asdict(request) for request in requests]))
        self._signal(signal.SIGSTOP)
        seconds, after = time.monotonic() - start, processor_seconds(self._process.pid)
        own, whole = after[0] - before[0], after[1] - before[1]
        measured = dataclasses.replace(measured, cores_of_others=max(0.0, whole - own) / seconds)
        counts = [request.num_output_tokens for request in measured.requests]
        expected = [request.num_output_tokens for request in requests]
        if counts != expected:
            wrong = [f"{got} for {want}" for got, want in zip(counts, expected, strict=True) if got != want]
            raise RunnerError(f"other numbers of tokens than asked for: {', '.join(wrong[:5])}")
        return measured

    def close(self) -> None:
        """End the process and all processes that it started: first politely, then by force."""
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, question: Any) -> dict[str, Any]:
        """Send a line and return the answering line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RunnerError(self._epitaph()) from error
        answer: dict[str, Any] = json.loads(self._read_line())
        if "error" in answer:
            raise RunnerError(answer["error"])
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line, deadline, descriptor = b"", time.monotonic() + MAX_SECONDS, self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RunnerError(f"no answer within {MAX_SECONDS} s")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise RunnerError(self._epitaph())
            line += piece
        return line

    def _epitaph(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"it ended with status {self._process.returncode}: {''.join(last) or 'it said nothing'}"
