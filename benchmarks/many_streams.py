"""Runs a thousand concurrent streams on the embedded model in bfloat16, in rounds: do all finish, is memory constant?

python benchmarks/many_streams.py --output-folder benchmarks/results
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import LOGS, RESULTS, describe_machine
from benchmarks.peers.protocol import resident_memory
from benchmarks.serving import Server

COMMAND = [sys.executable, "-m", "inflight", "serve", "--dtype", "bfloat16", "--port", "{port}"]
MEBIBYTE = 2**20


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    server = Server("inflight serve", COMMAND, ("ids",))
    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        f"# {arguments.streams} streams at once, {arguments.rounds} rounds",
        "",
        "`python benchmarks/many_streams.py`: embedded model in bfloat16, prompts of 30 tokens, answers of 24. "
        f"{machine}.",
        "",
        "| round | finished | failed | tokens/s | server CPU s | resident MiB |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines))
    try:
        server.start(2, LOGS / "many_streams.log")
        for number in range(arguments.rounds):
            report = server.measure("ids", number, workload=["--num-requests", str(arguments.streams), *LENGTHS])
            assert server.process is not None
            memory = resident_memory(server.process.pid) / MEBIBYTE
            failed = report["num_requests"] - report["num_completed"]
            lines.append(
                f"| {number + 1} | {report['num_completed']} | {failed} | {report['output_tokens_per_second']:.0f} | "
                f"{report['server_cpu_seconds']:.1f} | {memory:.0f} |"
            )
            print(lines[-1], json.dumps(report["failures"]) if failed else "", flush=True)
    finally:
        server.end()
    (arguments.output_folder / "many-streams.md").write_text("\n".join([*lines, ""]))


LENGTHS = ["--random-input-len", "30", "--random-output-len", "24"]

if __name__ == "__main__":
    main()
