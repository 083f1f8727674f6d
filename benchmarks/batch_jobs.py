"""What a batch job costs: to those who share its server, and to itself for being durable.

python -m benchmarks.batch_jobs --measure interactive --model qwen3-0.6b --options "--dtype bfloat16"
python -m benchmarks.batch_jobs --measure durable --lines 100_000

- `interactive`: time to first token and between tokens of requests that arrive one by one at a server (`inflight bench
  serve`), alone and with a job in the background, in turn, and what the job does meanwhile.
- `durable`: seconds of `inflight batch`, and of `inflight generate` with the same file, which keeps nothing until its
  end; on the embedded model, in turn.
- `lines`: memory of a process that does a job of many lines, answered at once.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai

from benchmarks.peers.models import model_folder
from inflight.batches.database import Database
from inflight.batches.files import Files
from inflight.batches.ledger import Ledger
from inflight.batches.worker import Worker

PORT = 8437
VOCABULARY = 1000
"""Vocabulary size of all models."""

COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"


def write_requests(path: Path, num_lines: int, lengths: tuple[int, int], most_tokens: int, text: str | None) -> None:
    """Write a batch file of prompts: random token ids of a length in `lengths`, or a text."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(num_lines):
            ids = [rng.randrange(100, VOCABULARY) for _ in range(rng.randint(*lengths))]
            prompt = ids if text is None else f"{text} {number}"
            body = {"prompt": prompt, "max_tokens": most_tokens, "temperature": 0, "ignore_eos": True}
            request = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
            file.write(json.dumps(request) + "\n")


@contextmanager
def server(arguments: argparse.Namespace, folder: Path) -> Iterator[openai.OpenAI]:
    """A server with a folder for jobs."""
    command = [sys.executable, "-m", "inflight", "serve", "--port", str(PORT), "--batch-dir", str(folder / "jobs")]
    model = [] if arguments.model == "embedded" else [str(model_folder(arguments.model))]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *model, *shlex.split(arguments.options)], stderr=log, stdout=log)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=200)
    try:
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                if process.poll() is not None:
                    raise RuntimeError((folder / "log").read_text()) from None
                time.sleep(0.5)
        yield client
    finally:
        process.terminate()
        process.wait()


def load(arguments: argparse.Namespace, seed: int, salt: str) -> dict[str, Any]:
    """Requests that arrive one by one, the same for the same seed, but with nothing of other salts in the cache; the
    report."""
    command = [sys.executable, "-m", "inflight", "bench", "serve", "--base-url", f"http://127.0.0.1:{PORT}", "--json"]
    options = {
        "--num-requests": arguments.requests,
        "--request-rate": arguments.rate,
        "--random-input-len": arguments.prompt_tokens,
        "--random-output-len": arguments.output_tokens,
        "--seed": seed,
        "--extra-body": json.dumps({"cache_salt": salt}),
        "--prompt-kind": "ids",
        "--vocab-size": VOCABULARY,
    }
    words = [str(part) for option in options.items() for part in option]
    done = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def interactive(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what clients notice of a job, and the job of them."""
    write_requests(folder / "requests.jsonl", 200_000, (64, 512), 64, None)
    first, between = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with server(arguments, folder) as client:
        with (folder / "requests.jsonl").open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        load(arguments, 100, "first")  # the first requests of a server are slower
        for number in range(arguments.rounds):
            for name in ("alone", "with a job"):
                if name == "alone":
                    report = load(arguments, number, name)
                else:
                    job = client.batches.create(
                        input_file_id=uploaded.id, endpoint=COMPLETIONS, completion_window="24h"
                    )
                    before = started(client, job.id, at_least=70)
                    start = time.perf_counter()
                    report = load(arguments, number, name)
                    seconds = time.perf_counter() - start
                    after = started(client, job.id, at_least=0)
                    print(f"the job meanwhile: {(after - before) / seconds:.2f} requests/s", flush=True)
                    start, idle = time.perf_counter(), after
                    time.sleep(arguments.idle_seconds)
                    after = started(client, job.id, at_least=0)
                    print(f"the job alone: {(after - idle) / (time.perf_counter() - start):.2f} requests/s", flush=True)
                    client.batches.cancel(job.id)
                    while client.batches.retrieve(job.id).status != "cancelled":
                        time.sleep(0.5)
                for request in report["requests"]:
                    times = request["token_times"]
                    first[name].append(times[0] - request["scheduled"])
                    between[name] += [after - before for before, after in pairwise(times)]
                report_of(name, first[name], between[name])
    ratio = percentile(first["with a job"], 95) / percentile(first["alone"], 95)
    print(f"p95 of the time to first token, with a job / alone: {ratio:.2f}")


def started(client: openai.OpenAI, job_id: str, at_least: int) -> int:
    """Wait until this many requests of a job are answered; return the number."""
    while True:
        counts = client.batches.retrieve(job_id).request_counts
        assert counts is not None
        if counts.completed >= at_least:
            return counts.completed
        time.sleep(0.2)


def percentile(values: list[float], percent: float) -> float:
    """A percentile."""
    return float(np.percentile(np.array(values), percent))


def report_of(name: str, first: list[float], between: list[float]) -> None:
    """Print latencies in milliseconds."""
    ttft = ", ".join(f"p{percent} {1000 * percentile(first, percent):.0f}" for percent in (50, 95))
    itl = ", ".join(f"p{percent} {1000 * percentile(between, percent):.1f}" for percent in (50, 99))
    print(f"{name}: time to first token {ttft} ms, between tokens {itl} ms; {len(first)} requests", flush=True)


def durable(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what durability costs."""
    requests = folder / "requests.jsonl"
    write_requests(requests, arguments.lines, (1, 1), 16, "Once upon a time")
    seconds = defaultdict[str, list[float]](list)
    for number in range(arguments.rounds):
        for name in ("batch", "generate"):
            output = folder / f"{name}-{number}.jsonl"
            file = [str(requests)] if name == "batch" else ["--file", str(requests)]
            command = [sys.executable, "-m", "inflight", name, *file, "--output", str(output), "--quiet"]
            start = time.perf_counter()
            subprocess.run([*command, *shlex.split(arguments.options)], check=True)
            seconds[name].append(time.perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
            assert sum(1 for _ in output.open("rb")) == arguments.lines
    with_, without = (statistics.median(each) for each in seconds.values())
    print(f"{arguments.lines} lines: {with_:.1f} s durable, {without:.1f} s not ({with_ / without:.3f})")


class AtOnce:
    """Answers at once."""

    async def wait_until_ready(self) -> None:
        """See `Answerer`."""

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """See `Answerer`."""
        await asyncio.sleep(0)
        return 200, b'{"choices": [{"text": "%b"}], "usage": {"prompt_tokens": 1}}' % (b"x" * 500)


def lines(arguments: argparse.Namespace, folder: Path) -> None:
    """Print the memory and the time of a job of many lines."""
    requests = folder / "requests.jsonl"
    write_requests(requests, arguments.lines, (1, 1), 16, "Once upon a time")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    database = Database(folder / "jobs")
    files = Files(database)
    ledger = Ledger(database, files)
    new = files.create()
    with requests.open("rb") as file:
        while data := file.read(2**20):
            new.write(data)
    start = time.perf_counter()
    job = ledger.create(files.add(new, "", "requests", "batch").id, None, "none")
    reached: dict[str, float] = {}
    worker = Worker(ledger, files, AtOnce(), 1000, lambda now: reached.setdefault(now.status, time.perf_counter()))  # type: ignore[arg-type]
    asyncio.run(worker.work_on_next())
    ended = ledger.get(job.id)
    assert ended is not None
    assert ended.num_completed == arguments.lines
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    read, done, end = (reached[each] - start for each in ("in_progress", "finalizing", "completed"))
    size = sum(os.path.getsize(path) for path in (folder / "jobs").rglob("*") if path.is_file()) / 2**30
    print(
        f"{arguments.lines} lines: {used:.0f} MiB more memory; read in {read:.1f} s, answered in {done - read:.1f} s, "
        f"results written in {end - done:.1f} s; {size:.1f} GiB on the disk"
    )


MEASURES = {"interactive": interactive, "durable": durable, "lines": lines}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", required=True, choices=MEASURES)
    parser.add_argument("--model", default="embedded", help="of the server")
    parser.add_argument("--options", default="", help="of the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=30, help="in a round")
    parser.add_argument("--rate", type=float, default=0.2, help="requests a second")
    parser.add_argument("--prompt-tokens", default="uniform:64:512")
    parser.add_argument("--output-tokens", default="32")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        MEASURES[arguments.measure](arguments, Path(folder))


if __name__ == "__main__":
    main()
