"""The protocol between `compare.py` and a runner, one line of JSON in and one out; and the runner's half of it.

A runner is a process in its peer's own environment. Its first input line says what to load (`Settings`), and it answers
`Loaded`; each further line is a list of requests that are submitted at once, and it answers `Measured`. It ends when
its standard input ends. What the peer's libraries print to standard output goes to standard error instead.

Standard library only: every peer's Python imports this.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.workloads import Request

CLEAR_PEAK_MEMORY = "5"
"""The value for `/proc/PID/clear_refs` that resets the peak to the memory resident now (Linux 4.0)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a runner loads, and how.

    Attributes:
        model: file or folder, in the peer's format.
        dtype: "float32" or "bfloat16", of weights, cache and arithmetic, as far as the peer supports it.
        quantization: "int8" (weights) or None.
        num_slots: how many requests may run at once.
        num_threads: threads for arithmetic.
        max_model_len: tokens of the longest request, prompt and output together.
        max_batch_tokens: the token budget of a step, if the peer has one.
        speculation: "ngram" (what followed the same tokens before) or "draft" (`draft_model`); None: nothing is
            drafted, because what a model of random weights says repeats itself.
        draft_model: file or folder, in the peer's format.
        acceptance: how likely a draft token counts as right, whatever the model says; None: if it is.
        device: "cpu" or "cuda", for runners that know both.
    """

    model: str
    dtype: str
    quantization: str | None
    num_slots: int
    num_threads: int
    max_model_len: int
    max_batch_tokens: int = 512
    speculation: str | None = None
    draft_model: str | None = None
    acceptance: float | None = None
    device: str = "cpu"

    def acceptance_rates(self, length: int) -> list[float]:
        """How likely the first 1, 2, … draft tokens are all right."""
        assert self.acceptance is not None
        return [self.acceptance**number for number in range(1, length + 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A runner is ready. Memory is the bytes resident in all its processes.

    Attributes:
        versions: versions of Python and of the peer's packages.
        options: the peer's own settings that affect speed, for the report.
    """

    versions: dict[str, str]
    options: dict[str, Any]
    import_seconds: float
    load_seconds: float
    memory_after_import: int
    memory_after_load: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMeasured:
    """One request: its tokens, and seconds from submission to its first token and to its end."""

    num_output_tokens: int
    first_token_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One run of a workload.

    Attributes:
        seconds: from submission until all requests were done.
        peak_memory: the most bytes resident during the run.
        cores_of_others: how many cores other processes used during the run; near 0 on a quiet machine.
    """

    seconds: float
    requests: list[RequestMeasured]
    peak_memory: int
    cores_of_others: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """A peer's result for a request: number of tokens; first token and end in seconds of `time.perf_counter()`."""

    num_output_tokens: int
    first_token_time: float
    end_time: float


class Model(Protocol):
    """A loaded peer. `options` as in `Loaded`."""

    options: dict[str, Any]

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        """Submit all requests now, greedy, ignoring EOS; return their results in order when all are done."""
        ...


class RunnerError(Exception):
    """A runner failed; the message is for the reader of the report."""


def measured_from(answer: dict[str, Any]) -> Measured:
    """Return `Measured` from its JSON form."""
    return Measured(**{**answer, "requests": [RequestMeasured(**request) for request in answer["requests"]]})


# --------------------------------------------------------------------------------------------------- a runner's half


def serve(load: Callable[[Settings], Model], *, modules: Sequence[str], distributions: Sequence[str]) -> None:
    """Run a runner until standard input ends.

    `modules` are imported first, because the peer needs them; `load` imports them again by name. The versions of
    `distributions` are reported.
    """
    answers = _take_standard_output()
    try:
        settings = Settings(**json.loads(sys.stdin.readline()))
        start = time.perf_counter()
        for module in modules:
            importlib.import_module(module)
        import_seconds, memory_after_import = time.perf_counter() - start, resident_memory()
        start = time.perf_counter()
        model = load(settings)
        load_seconds = time.perf_counter() - start
        versions = {"python": platform.python_version(), **{name: _version(name) for name in distributions}}
        loaded = Loaded(versions, model.options, import_seconds, load_seconds, memory_after_import, resident_memory())
        _tell(answers, dataclasses.asdict(loaded))
        for line in sys.stdin:
            requests = [Request(**request) for request in json.loads(line)]
            _tell(answers, dataclasses.asdict(_measure(model, requests)))
    except Exception as error:
        traceback.print_exc()
        _tell(answers, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


def _measure(model: Model, requests: list[Request]) -> Measured:
    forget_peak_memory()
    start = time.perf_counter()
    times = model.generate(requests)
    seconds = time.perf_counter() - start
    measured = [RequestMeasured(t.num_output_tokens, t.first_token_time - start, t.end_time - start) for t in times]
    return Measured(seconds, measured, peak_memory())


def _take_standard_output() -> TextIO:
    """Reserve standard output for answers; all other output goes to standard error from now on, line by line, so that
    its last line says why a runner ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return answers


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ------------------------------------------------------------------------------- memory, as Linux keeps account of it


def family(root: int | None = None) -> list[int]:
    """Return the process `root` (default: this one) and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process may have ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root or os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found


def resident_memory(root: int | None = None) -> int:
    """Return the bytes resident now in the process and its descendants."""
    return sum(_memory(process, "VmRSS") for process in family(root))


def peak_memory(root: int | None = None) -> int:
    """Return the most bytes resident since `forget_peak_memory` in the process and its descendants.

    For several processes it is the sum of their peaks; pages that they share (libraries) count once per process.
    """
    return sum(_memory(process, "VmHWM") for process in family(root))


def forget_peak_memory(root: int | None = None) -> None:
    """Reset the peaks; if the kernel does not allow it, they stay the peaks since the start of the process."""
    for process in family(root):
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text(CLEAR_PEAK_MEMORY)


def processor_seconds(root: int | None = None) -> tuple[float, float]:
    """Return the CPU seconds since their start: of the process and its descendants, and of the whole machine."""
    ticks, own = os.sysconf("SC_CLK_TCK"), 0
    for process in family(root):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            own += sum(map(int, fields[11:15]))  # user and system time, its own and of children that have ended
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return own / ticks, (user + nice + system + sum(rest)) / ticks


def _memory(process: int, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
