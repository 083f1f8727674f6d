"""What Ray costs on one machine: Ray Serve beside `inflight serve`, Ray Data beside `inflight batch`.

python -m benchmarks.ray_cluster --measure serve --model gpt2
python -m benchmarks.ray_cluster --measure serve --model gpt2 --load "one every two seconds"
python -m benchmarks.ray_cluster --measure data --rows 10_000

serve: workload W2 (`workloads.py`), all 32 requests at once and streamed, from `inflight bench serve`; or requests so
    far apart that each is alone. Each server is restarted in each round, alone, with one engine of all cores, and gets
    the load twice; the first is not counted. Ray's own processes and the load generator share the cores.
data: rows with a prompt each through the embedded model, from reading a file to the last result in another, with the
    start of the engine: in `inflight batch`, and on a running cluster, where nothing is killed, or the actor with the
    engine is killed twice, each time after 12 seconds of the engine's CPU time. Results are compared.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder

PORT = 8437
SECONDS_TO_START = 300


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=("serve", "data"), required=True)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--load", choices=LOADS, default="W2-32")
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    {"serve": measure_serving, "data": measure_data}[options.measure](options)


# ------------------------------------------------------------------------------------------------- Serve

OURS, RAY, HAPROXY = "inflight serve", "Ray Serve", "Ray Serve with HAProxy"
ENVIRONMENT: dict[str, dict[str, str]] = {HAPROXY: {"RAY_SERVE_ENABLE_HA_PROXY": "1"}}
LOADS = {
    "W2-32": ["--workload", "W2", "--num-requests", "32"],
    "one every two seconds": [
        *("--num-requests", "10", "--request-rate", "0.5", "--burstiness", "1000"),
        *("--random-input-len", "100", "--random-output-len", "40"),
    ],
}

SERVE_ON_RAY = """
import json, signal, sys, threading
import ray
from ray import serve
from inflight.scale.serve import build_app
ray.init(address="local", log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(build_app(json.loads(sys.argv[2])))
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
ended.wait()
serve.shutdown()
"""


def measure_serving(options: argparse.Namespace) -> None:
    """Both servers in turn."""
    folder, engine = str(model_folder(options.model)), {"max_num_seqs": 32, "dtype": options.dtype}
    flags = [part for name, value in engine.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    on_ray = [sys.executable, "-c", SERVE_ON_RAY, str(PORT), json.dumps({"model": folder, "engine": engine})]
    ours = [*(sys.executable, "-m", "inflight", "serve", folder, "--port", str(PORT)), *flags]
    commands = {OURS: ours, RAY: on_ray, HAPROXY: on_ray}
    speeds: dict[str, list[float]] = defaultdict(list)
    firsts: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for server in commands if number % 2 else reversed(commands):
            with running(commands[server], ENVIRONMENT.get(server, {})):
                put_load(LOADS[options.load], seed=100)
                report = put_load(LOADS[options.load], seed=number)
                speeds[server].append(report["output_tokens_per_second"])
                firsts[server].append(report["ttft"]["median"])
                print(f"{server}: {speeds[server][-1]:.1f} tokens/s, TTFT p50 {firsts[server][-1]:.3f} s", flush=True)
    for server in commands:
        each = ", ".join(f"{one:.1f}" for one in speeds[server])
        speed, first = (median(table[server]) for table in (speeds, firsts))
        relative = [median(table[server]) / median(table[OURS]) for table in (speeds, firsts)]
        print(
            f"{server}: {speed:.1f} tokens/s ({each}), {relative[0]:.2f} of {OURS}; "
            f"TTFT p50 {1000 * first:.1f} ms, {relative[1]:.2f} times"
        )


@contextmanager
def running(command: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    """A server that answers at `PORT`."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not _answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"it does not start: {command}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _answers() -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def put_load(arguments: list[str], seed: int) -> dict[str, Any]:
    """The report of `inflight bench serve`."""
    command = [sys.executable, "-m", "inflight", "bench", "serve", "--base-url", f"http://127.0.0.1:{PORT}"]
    command += ["--prompt-kind", "ids", "--vocab-size", "1000", "--seed", str(seed), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    return report


# ------------------------------------------------------------------------------------------------- Data

BATCH, DATA, DATA_KILLED = "inflight batch", "Ray Data", "Ray Data, killed twice"
NUM_TOKENS = 32
SECONDS_BEFORE_KILL = 12.0
"""Of CPU time of the engine that is killed, its start included."""
ANSWERS: dict[int, dict[int, str]] = {}
"""The answers to this many prompts, from any server."""

ANSWER_ON_RAY = """
import json, sys, time
import ray
from ray.data.llm import build_processor
from inflight.scale.data import InflightProcessorConfig
source, folder, num_tokens = sys.argv[1:]
ray.init(address="local", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
params = {"max_tokens": int(num_tokens), "temperature": 0, "ignore_eos": True}
processor = build_processor(InflightProcessorConfig(sampling_params=params))
print("ready", flush=True)
sys.stdin.readline()
processor(ray.data.read_json(source, lines=True)).write_json(folder)
print("done", flush=True)
"""


def measure_data(options: argparse.Namespace) -> None:
    """Each way in turn."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [f"Once upon a time {number}" for number in range(options.rows)]
        write_prompts(folder, prompts)
        for number in range(options.rounds):
            ways: dict[str, Callable[[Path, Path], float]]
            ways = {BATCH: answer_in_batch, DATA: answer_on_ray, DATA_KILLED: partial(answer_on_ray, kills=2)}
            for way, work in ways.items():
                place = folder / f"{way} {number}"
                place.mkdir()
                seconds[way].append(work(folder, place))
                check_answers(place, prompts)
    for way, each in seconds.items():
        listed = ", ".join(f"{one:.1f}" for one in each)
        print(f"{way}: {median(each):.1f} s ({listed}), {options.rows / median(each):.0f} rows/s")
    for way in (DATA, DATA_KILLED):
        print(f"{way}: {median(seconds[BATCH]) / median(seconds[way]):.2f} of the rows/s of {BATCH}")


def write_prompts(folder: Path, prompts: list[str]) -> None:
    """The same requests for both."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with (folder / "requests.jsonl").open("w") as requests, (folder / "rows.jsonl").open("w") as rows:
        for number, prompt in enumerate(prompts):
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            requests.write(json.dumps(request | {"body": body | {"prompt": prompt}}) + "\n")
            rows.write(json.dumps({"id": str(number), "prompt": prompt}) + "\n")


def answer_in_batch(folder: Path, place: Path) -> float:
    """Seconds of `inflight batch`."""
    start = time.monotonic()
    command = [sys.executable, "-m", "inflight", "batch", str(folder / "requests.jsonl")]
    subprocess.run([*command, "--output", str(place / "results.jsonl"), "--quiet"], check=True)
    return time.monotonic() - start


def answer_on_ray(folder: Path, place: Path, *, kills: int = 0) -> float:
    """Seconds of Ray Data, on a cluster that runs already."""
    command = [sys.executable, "-c", ANSWER_ON_RAY, str(folder / "rows.jsonl"), str(place), str(NUM_TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            pass
        start = time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        for number in range(kills):
            kill_worker(number)
        while process.stdout.readline().strip() != "done":
            pass
        return time.monotonic() - start


def kill_worker(number: int) -> None:
    """Kill the actor that has an engine, once its engine has computed for some seconds."""
    while True:
        for engine in engines_on_ray():
            actor, ticks = stat_of(engine)
            if ticks > SECONDS_BEFORE_KILL * os.sysconf("SC_CLK_TCK"):
                os.kill(actor, signal.SIGKILL)
                print(f"an actor is killed, for the {('first', 'second')[number]} time", flush=True)
                while engine in engines_on_ray():
                    time.sleep(0.01)
                return
        time.sleep(0.05)


def engines_on_ray() -> list[int]:
    """The engines' processes whose parents are actors of Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"inflight.engine.process" in (folder / "cmdline").read_bytes():
                parent = Path(f"/proc/{stat_of(int(folder.name))[0]}")
                if (parent / "cmdline").read_bytes().startswith(b"ray::"):
                    found.append(int(folder.name))
    return found


def stat_of(pid: int) -> tuple[int, int]:
    """A process's parent, and the ticks of CPU time that it had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[11]) + int(fields[12])


def check_answers(place: Path, prompts: list[str]) -> None:
    """All rows are there once, with the right answers."""
    found: dict[int, str] = {}
    for file in place.glob("*.json*"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            number = int(row.get("id") if "generated_text" in row else row["custom_id"])
            assert number not in found, f"row {number} is there twice"
            found[number] = row.get("generated_text") or row["response"]["body"]["choices"][0]["text"]
    assert len(found) == len(prompts), f"{len(prompts) - len(found)} rows are lost"
    assert found == ANSWERS.setdefault(len(prompts), found), "answers differ"


if __name__ == "__main__":
    main()
