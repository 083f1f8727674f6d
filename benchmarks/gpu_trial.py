"""Tries everything that is written for GPUs, within minutes: machine, tests, exactness, batch invariance, speed.

    python -m benchmarks.gpu_trial                        # on a machine with a CUDA device; ten minutes at most
    python -m benchmarks.gpu_trial --device cpu --quick   # the same path on a CPU, small
    python -m benchmarks.gpu_trial --download wheels      # with package indexes: gets what the other machine may lack
    python -m benchmarks.gpu_trial --wheels wheels        # first installs from there what is missing or differs

Each result is printed, and written to a folder, as soon as it is known, so a trial that is cut leaves all before that;
each failure's traceback has a file there. The table at the end says what was reached. Exits with 1 if anything failed.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("machine", "tests", "speed", "exactness", "invariance")
SHARES = {"tests": 0.25, "speed": 0.5, "exactness": 0.75, "invariance": 1.0}
"""How much of the time that is left a stage may take."""
WORKLOADS = ("W1", "W2-32", "one")
ROUNDS = 2
QUICK = ("--architectures", "llama", "--requests", "6")
NOT_CARRIED = re.compile(r"(torch|numpy|triton|nvidia|cuda|setuptools)")
"""Packages that a machine with a GPU has, and that are too large to carry."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result. `result`: "passed", "failed", "skipped" or "cut"."""

    stage: str
    name: str
    result: str
    figure: str


class Trial:
    """Keeps results in a folder.

    Args:
        seconds: of the whole trial.
    """

    def __init__(self, folder: Path, device: str, seconds: float, is_quick: bool) -> None:
        self.folder, self.device, self.is_quick = folder, device, is_quick
        self.outcomes: list[Outcome] = []
        self._end = time.monotonic() + seconds
        (folder / "failures").mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, stage: str, name: str, result: str, figure: str, details: str = "") -> None:
        """Keep a result, and the traceback (`details`) of a failure."""
        self.outcomes.append(Outcome(stage, name, result, " ".join(figure.split())[:300]))
        if details:
            number = sum(each.result == "failed" for each in self.outcomes)
            (self.folder / "failures" / f"{number:02}-{stage}.txt").write_text(f"{name}\n\n{details}")
        (self.folder / "results.json").write_text(json.dumps([asdict(each) for each in self.outcomes], indent=2))
        print(f"{stage:<11}{result:<8} {name}: {self.outcomes[-1].figure}", flush=True)

    def table(self) -> str:
        """What was reached, stage by stage, and all failures and figures of speed."""
        lines = ["| stage | passed | failed | skipped | cut |", "|---|---|---|---|---|"]
        for stage in STAGES:
            results = [each.result for each in self.outcomes if each.stage == stage]
            counts = (str(results.count(result)) for result in ("passed", "failed", "skipped", "cut"))
            lines.append(f"| {stage} | {' | '.join(counts)} |")
        shown = [
            each for each in self.outcomes if each.stage in ("machine", "speed") or each.result in ("failed", "cut")
        ]
        lines += ["", "| | result | |", "|---|---|---|"]
        lines += [f"| {each.stage}: {each.name} | {each.result} | {each.figure} |" for each in shown]
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- stages


def machine(trial: Trial) -> None:
    """What is here."""
    import torch

    versions = {name: metadata.version(name) for name in ("torch", "transformers") if find_spec(name)}
    trial.add("machine", "versions", "passed", f"Python {platform.python_version()}, {versions}")
    name = platform.processor() or platform.machine()
    if trial.device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout if _has(query[0]) else ""
        name = f"{found.strip() or torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}"
    trial.add("machine", trial.device, "passed", name)
    trial.add("machine", "vLLM", "passed" if find_spec("vllm") else "skipped", "" if find_spec("vllm") else "not here")


def tests(trial: Trial) -> None:
    """`tests/gpu`, which skips itself without a CUDA device."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-v",
        "--tb=long",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    log = trial.folder / "tests.txt"
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    with log.open("w") as file:
        for line in lines_of(trial, "tests", command):
            file.write(line)
            if (found := re.match(r"(\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b", line)) is not None:
                counts[found[2]] += 1
                if found[2] in ("FAILED", "ERROR"):
                    trial.add("tests", found[1], "failed", f"see {log.name}")
    if counts["PASSED"]:
        trial.add("tests", "tests/gpu", "passed", f"{counts['PASSED']} tests")
    elif counts["SKIPPED"]:
        trial.add("tests", "tests/gpu", "skipped", f"{counts['SKIPPED']} tests")


def cases(trial: Trial, stage: str) -> None:
    """The architectures of the exactness suite (`tests/gpu/trial.py`)."""
    command = [sys.executable, "-m", "tests.gpu.trial", stage, "--device", trial.device]
    for line in lines_of(trial, stage, [*command, *(QUICK if trial.is_quick else ())]):
        said = json.loads(line)
        result = "passed" if said["is_ok"] else "failed"
        trial.add(stage, said["name"], result, said["figure"], said.get("traceback", ""))


def speed(trial: Trial) -> None:
    """Tokens per second, one engine after the other, because each takes the device's memory."""
    from benchmarks.peers.catalogue import OURS, PEERS
    from benchmarks.peers.models import model_folder
    from benchmarks.peers.protocol import RunnerError, Settings
    from benchmarks.peers.runner import Runner
    from benchmarks.workloads import WORKLOADS as ALL

    model = str(_tiny(trial.folder / "model") if trial.is_quick else model_folder("qwen3-0.6b"))
    peers = {name: PEERS[name].module for name in (OURS, "hf-static", "hf-continuous")}
    peers |= {"vllm": PEERS["vllm"].module} if find_spec("vllm") else {}
    end = time.monotonic() + SHARES["speed"] * trial.seconds_left
    for workload in (ALL[name] for name in (WORKLOADS[:1] if trial.is_quick else WORKLOADS)):
        for name, module in peers.items():
            settings = Settings(
                model, "bfloat16", None, workload.num_slots, os.cpu_count() or 1, workload.max_model_len,
                device=trial.device,
            )  # fmt: skip
            log = trial.folder / f"{name}-{workload.name}.txt"
            try:
                with (
                    time_limit(end - time.monotonic()),
                    Runner([sys.executable, "-m", module], settings, log) as runner,
                ):
                    runs = [runner.run(workload.requests(number)).seconds for number in range(-1, ROUNDS)][1:]
            except TimeoutError:
                trial.add("speed", f"{name}, {workload.name}", "cut", "no time was left")
            except (RunnerError, OSError) as error:
                details = f"{traceback.format_exc()}\n{log.read_text() if log.exists() else ''}"
                trial.add("speed", f"{name}, {workload.name}", "failed", str(error), details)
            else:
                figure = f"{workload.num_output_tokens / statistics.median(runs):,.1f} tokens/s"
                trial.add("speed", f"{name}, {workload.name}", "passed", figure)


def lines_of(trial: Trial, stage: str, command: Sequence[str]) -> Iterator[str]:
    """The lines that a stage's process prints, until it ends or its time is up. If it fails without a word, that is a
    result."""
    log = trial.folder / f"{stage}-errors.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0)
    assert process.stdout is not None
    was_cut = threading.Event()

    def cut() -> None:
        was_cut.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(SHARES[stage] * trial.seconds_left, cut)
    timer.start()
    try:
        yield from process.stdout
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if was_cut.is_set():
        trial.add(stage, "the rest", "cut", "the stage's time was up")
        return
    has_failed = any(each.stage == stage and each.result == "failed" for each in trial.outcomes)
    if process.returncode and not has_failed:
        trial.add(stage, "the stage", "failed", f"it ended with {process.returncode}", log.read_text())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside after this number of seconds."""

    def expire(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tiny(folder: Path) -> Path:
    """A checkpoint of a tiny model whose vocabulary has the token ids of the workloads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=20_000, **sizes)).save_pretrained(folder)
    return folder


def _has(program: str) -> bool:
    return any(os.access(Path(folder) / program, os.X_OK) for folder in os.get_exec_path())


# ------------------------------------------------------------------------------------------------- packages


def needed(names: Sequence[str] = ("inflight-llm", "pytest", "hypothesis")) -> dict[str, str]:
    """The packages that these need here, extras left out, and their versions."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found or NOT_CARRIED.match(name):
            continue
        found[name] = metadata.version(name)
        requirements = map(Requirement, metadata.requires(name) or [])
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {name: version for name, version in found.items() if name != "inflight-llm"}


def download(folder: Path) -> None:
    """Download the wheels that a machine with torch may lack, and a list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version}" for name, version in needed().items()]
    (folder / "wanted.txt").write_text("\n".join(wanted) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, "-r", str(folder / "wanted.txt")], check=True)


def install(folder: Path) -> None:
    """Install those that are missing or of another version here. Standard library only: there may be nothing yet."""
    wanted = (folder / "wanted.txt").read_text().split()
    missing = [each for each in wanted if not _is_here(*each.split("=="))]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--find-links", str(folder)]
        subprocess.run([*command, *missing], check=True)


def _is_here(name: str, version: str) -> bool:
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-trial")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--quick", action="store_true", help="one architecture, a tiny model, one workload")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="only download wheels to carry")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="first install what is missing from there")
    given = parser.parse_args()
    if given.download is not None:
        download(given.download)
        return
    if given.wheels is not None:
        install(given.wheels)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    sys.path.insert(0, str(ROOT / "src"))
    trial = Trial(given.output, given.device, 60 * given.minutes, given.quick)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the table is written
    try:
        for stage in STAGES:
            run_stage(trial, stage)
    finally:
        (trial.folder / "table.md").write_text(trial.table() + "\n")
        print(trial.table(), flush=True)
    sys.exit(any(each.result == "failed" for each in trial.outcomes))


def run_stage(trial: Trial, stage: str) -> None:
    """Run a stage; whatever goes wrong in it is a result, and the next one runs."""
    try:
        match stage:
            case "exactness" | "invariance":
                cases(trial, stage)
            case _:
                {"machine": machine, "tests": tests, "speed": speed}[stage](trial)
    except Exception as error:
        trial.add(stage, "the stage", "failed", f"{type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main()
