"""What Ray costs on one machine: Ray Serve beside `inflight serve`, Ray Data beside `inflight batch`.

python -m benchmarks.ray_cluster --measure serve --model gpt2 --rounds 3

serve: workload W2 (`workloads.py`), all 32 requests at once and streamed, from `inflight bench serve`; and the same
    requests one after another. Each server is started anew in each round, alone, with one engine of all cores, and gets
    the load twice; the first is not counted. Ray's own processes and the load generator share the cores.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder

PORT = 8437
SECONDS_TO_START = 300


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=("serve",), required=True)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    measure_serving(options)


# ------------------------------------------------------------------------------------------------- Serve

RAY = "Ray Serve"
OURS = "inflight serve"
LOADS = {
    "W2-32": ["--workload", "W2", "--num-requests", "32"],
    "one at a time": [
        *("--num-requests", "8", "--max-concurrency", "1"),
        *("--random-input-len", "100", "--random-output-len", "60"),
    ],
}

SERVE_ON_RAY = """
import json, signal, sys, threading
import ray
from ray import serve
from inflight.scale.serve import build_app
ray.init(include_dashboard=True, log_to_driver=False)
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
    commands = {
        OURS: [*(sys.executable, "-m", "inflight", "serve", folder, "--port", str(PORT)), *flags],
        RAY: [sys.executable, "-c", SERVE_ON_RAY, str(PORT), json.dumps({"model": folder, "engine": engine})],
    }
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    firsts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for server in commands if number % 2 else reversed(commands):
            with running(commands[server]):
                for load, arguments in LOADS.items():
                    put_load(arguments, seed=100)
                    report = put_load(arguments, seed=number)
                    speeds[load, server].append(report["output_tokens_per_second"])
                    firsts[load, server].append(report["ttft"]["median"])
    for load in LOADS:
        for server in commands:
            each = ", ".join(f"{one:.1f}" for one in speeds[load, server])
            print(
                f"{load}, {server}: {median(speeds[load, server]):.1f} tokens/s ({each}), "
                f"TTFT p50 {1000 * median(firsts[load, server]):.1f} ms"
            )
        speed, first = (median(table[load, RAY]) / median(table[load, OURS]) for table in (speeds, firsts))
        print(f"{load}: Ray Serve has {speed:.2f} of the tokens/s, and {first:.2f} times the TTFT")


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A server that answers at `PORT`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
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


if __name__ == "__main__":
    main()
