"""Compares servers on this machine's CPU: the same load over HTTP, each server in its own process.

python benchmarks/serving.py --install
python benchmarks/serving.py --model gpt2 --dtype bfloat16 --rounds 3

Workload W2 (`workloads.py`), all 32 requests at once, from `inflight bench serve`; the first row is the engine alone,
without a server. Rounds are interleaved, and all servers but one are stopped meanwhile; load generator and server share
the cores. transformers' server accepts only text, so ours is also measured with words.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import LOGS, RESULTS, describe_machine, in_turn
from benchmarks.peers.catalogue import ENVIRONMENTS, OURS, PEERS, REQUIREMENTS
from benchmarks.peers.models import model_folder, prepare
from benchmarks.peers.protocol import Settings, family
from benchmarks.peers.runner import Runner
from benchmarks.workloads import WORKLOADS
from inflight.loadtest.workloads import FIRST_TOKEN_ID, WORDS

WORKLOAD = WORKLOADS["W2-32"]
TRANSFORMERS = ENVIRONMENTS / "transformers" / "bin"
SECONDS_TO_START = 300
ENGINE = "LLM.generate"


@dataclass(slots=True)
class Server:
    """A server under test.

    Attributes:
        command: starts the server; "{port}" stands for its port.
        prompt_kinds: the kinds of prompts that it gets.
        model: its model's name, if it cannot list its models.
    """

    name: str
    command: Sequence[str]
    prompt_kinds: Sequence[str]
    model: str | None = None
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, threads: int, log: Path) -> None:
        """Start the server, wait until it answers, and pause it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [part.format(port=self.port) for part in self.command],
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} does not start: {log.read_text()[-1000:]}")
            time.sleep(0.5)
        self.signal(signal.SIGSTOP)

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and all processes that it started."""
        assert self.process is not None
        for process in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> None:
        """End the server."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def measure(self, prompt_kind: str, seed: int, workload: Sequence[str] = ("--workload", "W2")) -> dict[str, Any]:
        """Run the load generator against the server and return its report."""
        assert self.process is not None
        self.signal(signal.SIGCONT)
        command = [sys.executable, "-m", "inflight", "bench", "serve", "--base-url", f"http://127.0.0.1:{self.port}"]
        options = [*workload, "--prompt-kind", prompt_kind, "--seed", str(seed), "--json"]
        options += ["--server-pid", str(self.process.pid)]
        options += ["--model", self.model] if self.model else []
        run = subprocess.run([*command, *options], capture_output=True, check=False)
        self.signal(signal.SIGSTOP)
        if run.returncode:
            raise SystemExit(f"{self.name}: {run.stderr.decode()[-1000:]}")
        report: dict[str, Any] = json.loads(run.stdout)["report"]
        return report


@dataclass(slots=True)
class Row:
    """The measurements of one variant, round by round."""

    speeds: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_failed: int = 0

    def add(self, report: dict[str, Any]) -> None:
        """Add a run's report."""
        self.speeds.append(report["output_tokens_per_second"])
        self.first_tokens.append(report["ttft"]["median"])
        self.server_seconds.append(report["server_cpu_seconds"])
        self.num_tokens.append(report["num_output_tokens"])
        self.num_failed += report["num_requests"] - report["num_completed"]


def with_words(model: Path) -> Path:
    """Make a copy of the model with a tokenizer in which each word of the load generator is one token."""
    folder = model.with_name(f"{model.name}-words")
    if folder.exists():
        return folder
    folder.mkdir()
    for file in model.iterdir():
        if "token" not in file.name and file.name not in ("vocab.json", "merges.txt"):
            (folder / file.name).symlink_to(file)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    vocabulary = {word: FIRST_TOKEN_ID + number for number, word in enumerate(dict.fromkeys(WORDS))}
    taken = set(vocabulary.values())
    vocabulary |= {f"<{token_id}>": token_id for token_id in range(size) if token_id not in taken}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<0>", "eos_token": f"<{size - 1}>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def servers(model: Path, arguments: argparse.Namespace) -> list[Server]:
    """Return all servers, or the requested ones."""
    slots, threads = str(WORKLOAD.num_slots), str(arguments.threads)
    context = str(WORKLOAD.num_slots * (-(-WORKLOAD.max_model_len // 256) * 256))
    ours = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "{port}", "--dtype", arguments.dtype]
    ours += ["--max-num-seqs", slots, "--max-num-batched-tokens", "512"]
    theirs = [str(TRANSFORMERS / "transformers"), "serve", str(model), "--port", "{port}", "--dtype", arguments.dtype]
    theirs += ["--device", "cpu"]
    llamacpp = PEERS["llamacpp"]
    found = [Server("inflight serve", ours, ("ids", "words"))]
    if "transformers" in arguments.peers:
        name, batching = "transformers serve", "--continuous-batching"
        found.append(Server(f"{name} {batching}", [*theirs, batching], ("words",), str(model)))
        found.append(Server(name, theirs, ("words",), str(model)))
    if "llamacpp" in arguments.peers:
        file = prepare(llamacpp, model_folder(arguments.model), arguments.dtype, None)
        command = [str(llamacpp.root / "build" / "bin" / "llama-server"), "-m", str(file), "--port", "{port}"]
        command += ["-np", slots, "-c", context, "-t", threads, "-tb", threads]
        found.append(Server("llama-server", command, ("ids",)))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--peers", default="transformers,llamacpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    parser.add_argument("--install", action="store_true", help="make the environment of transformers' server and exit")
    arguments = parser.parse_args()
    if arguments.install:
        subprocess.run([sys.executable, "-m", "venv", TRANSFORMERS.parent], check=True)
        requirements = REQUIREMENTS / "transformers.txt"
        subprocess.run([TRANSFORMERS / "python", "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        return
    model, console, rows = with_words(model_folder(arguments.model)), Console(highlight=False), dict[str, Row]()
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        settings = Settings(
            str(model), arguments.dtype, None, WORKLOAD.num_slots, arguments.threads, WORKLOAD.max_model_len
        )
        engine_command = [str(PEERS[OURS].python), "-m", PEERS[OURS].module]
        engine = stack.enter_context(Runner(engine_command, settings, LOGS / "engine.log"))
        engine.run(WORKLOAD.requests(-1))
        found = servers(model, arguments)
        for server in found:
            console.print(f"starting {server.name}")
            stack.callback(server.end)
            server.start(arguments.threads, LOGS / f"{server.name.replace(' ', '_')}.log")
            server.measure(server.prompt_kinds[0], 1000)
        for number in range(arguments.rounds):
            for name in in_turn([ENGINE, *(server.name for server in found)], number):
                if name == ENGINE:
                    measured = engine.run(WORKLOAD.requests(number))
                    row = rows.setdefault(ENGINE, Row())
                    row.speeds.append(WORKLOAD.num_output_tokens / measured.seconds)
                    row.first_tokens.append(median(each.first_token_seconds for each in measured.requests))
                    row.num_tokens.append(WORKLOAD.num_output_tokens)
                    console.print(f"{number + 1}: {name} {row.speeds[-1]:.1f} tokens/s")
                    continue
                server = next(each for each in found if each.name == name)
                for kind in server.prompt_kinds:
                    row = rows.setdefault(f"{name}, {kind}", Row())
                    row.add(server.measure(kind, number))
                    console.print(f"{number + 1}: {name}, {kind} {row.speeds[-1]:.1f} tokens/s")
    report = as_markdown(rows, arguments)
    (arguments.output_folder / f"serving-{model.name}-{arguments.dtype}.md").write_text(report)
    console.print(report)


def as_markdown(rows: dict[str, Row], arguments: argparse.Namespace) -> str:
    """Return medians, and our ratio to each server, computed round by round."""
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        f"# Serving: {arguments.model}, {arguments.dtype}",
        "",
        f"`python benchmarks/serving.py`, {arguments.rounds} rounds, {arguments.threads} threads. {machine}.",
        "",
        "|  | output tokens/s | from | to | inflight serve: it | TTFT p50 s | server CPU s | output tokens | failed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        ours = rows.get("inflight serve, words" if name.endswith("words") else "inflight serve, ids", row)
        ratio = median(a / b for a, b in zip(ours.speeds, row.speeds, strict=True))
        server = f"{median(row.server_seconds):.1f}" if row.server_seconds else ""
        lines.append(
            f"| {name} | {median(row.speeds):.1f} | {min(row.speeds):.1f} | {max(row.speeds):.1f} | {ratio:.2f} | "
            f"{median(row.first_tokens):.2f} | {server} | {median(row.num_tokens):.0f} | {row.num_failed} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
