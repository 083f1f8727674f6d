"""A soak test that kills jobs: `inflight batch` gets SIGKILL at random moments, and restarts until it is done. No
result may be lost, duplicated, or different from an uninterrupted run.

    python -m tests.batches.soak --kills 200 --lines 2000 --seed 1
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS_UNTIL_KILLED = 14.0
"""At most; loading takes about half of it."""


def make_requests(rng: random.Random, num_lines: int) -> list[dict[str, Any]]:
    """Requests of every kind: greedy, seeded, several sequences, common beginnings, and some that are refused."""
    requests = []
    for number in range(num_lines):
        sampling: dict[str, Any] = rng.choice([{"temperature": 0}, {"temperature": 1, "seed": number}])
        sampling["max_tokens"] = rng.choice([1, 4, 16, 48]) if rng.random() < 0.98 else -1
        text = f"{rng.choice(['Once upon a time', 'The old dragon', 'Lily and Tom'])} {rng.randint(0, 99)}"
        if rng.random() < 0.5:
            url, body = "/v1/completions", {"prompt": text, "n": rng.choice([1, 1, 2]), **sampling}
        else:
            url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **sampling}
        requests.append({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body})
    return requests


def command(requests: Path, output: Path) -> list[str]:
    """The command of a job."""
    options = ["--quiet", "--max-num-seqs", "16"]
    return [sys.executable, "-m", "inflight", "batch", str(requests), "-o", str(output), *options]


def run_killed(arguments: list[str], output: Path, rng: random.Random, num_kills: int) -> int:
    """Run a command to its end, and kill it at random moments before, up to a maximum. Returns the number of kills."""
    folder = output.with_name(output.name + ".job")
    for number in range(num_kills):
        if output.exists() and not folder.exists():  # it was killed when all was done
            return number
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=rng.uniform(0.1, SECONDS_UNTIL_KILLED))
        except subprocess.TimeoutExpired:
            # Sometimes the engine's process, too, and sometimes it has to notice by itself.
            os.killpg(process.pid, signal.SIGKILL) if rng.random() < 0.5 else process.kill()
            process.communicate()
            continue
        assert process.returncode == 0, errors.decode()
        return number
    subprocess.run(arguments, check=True)
    return num_kills


def results(output: Path) -> tuple[list[Any], list[Any]]:
    """The results and errors of a job, without fields that differ between runs."""
    both = []
    for path in (output, output.with_suffix(".errors.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            del line["id"], line["response"]["request_id"]
            for name in ("id", "created", "usage"):  # (how much was in the cache differs)
                line["response"]["body"].pop(name, None)
        both.append(lines)
    return both[0], both[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, start = random.Random(arguments.seed), time.monotonic()
    num_kills = num_jobs = 0
    while num_kills < arguments.kills:
        with tempfile.TemporaryDirectory() as name:
            requests, once, killed = (Path(name) / f"{each}.jsonl" for each in ("requests", "once", "killed"))
            made = make_requests(rng, arguments.lines)
            requests.write_text("".join(json.dumps(each) + "\n" for each in made))
            subprocess.run(command(requests, once), check=True, stderr=subprocess.DEVNULL)
            num_kills += run_killed(command(requests, killed), killed, rng, arguments.kills - num_kills)
            assert results(killed) == results(once)
            ids = [line["custom_id"] for lines in results(killed) for line in lines]
            assert sorted(ids) == sorted(each["custom_id"] for each in made)
            assert not killed.with_name(killed.name + ".job").exists()
        num_jobs += 1
        print(f"{num_jobs} jobs, {num_kills} kills, {time.monotonic() - start:.0f} s: nothing lost", flush=True)


if __name__ == "__main__":
    main()
