"""Compares inflight with other engines on this machine's CPU: the same requests, each engine in its own process.

python benchmarks/compare.py --install openvino,vllm,llamacpp,mistralrs,ctranslate2
python benchmarks/compare.py --model gpt2 --dtype bfloat16 --peers hf-static,hf-continuous,openvino,vllm

For each workload (`workloads.py`) all engines are loaded and each runs one warm-up round. Then rounds are interleaved:
in each round every engine runs the same requests once, in an order that shifts from round to round, while all others
are stopped. Medians, ratios, memory and latencies are printed, and written as Markdown, JSON and a picture.

A peer's runner in `peers/` decides how the peer is run; its requirements file there decides its versions.
"""

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.peers.catalogue import FOLDER, OURS, PEERS, Peer
from benchmarks.peers.install import install
from benchmarks.peers.models import model_folder, prepare
from benchmarks.peers.protocol import Measured, RunnerError, Settings
from benchmarks.peers.report import rich_table, write_report
from benchmarks.peers.results import CellResult, Comparison, PeerRuns
from benchmarks.peers.runner import Runner
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS, Workload

RESULTS = Path(__file__).resolve().parent / "results"
LOGS = FOLDER / ".logs"
WARM_UP_ROUND = -1
QUIET = 0.1
"""How many cores other processes may use before the figures are marked as doubtful."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A peer with the model that it loads."""

    peer: Peer
    model: Path
    draft_model: Path | None = None

    @property
    def command(self) -> list[str]:
        return [str(self.peer.python), "-m", self.peer.module]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare, from the command line."""

    model: str
    dtype: str
    quantization: str | None
    rounds: int
    threads: int
    max_batch_tokens: int
    speculation: str | None = None
    draft_model: str | None = None
    acceptance: float | None = None

    def settings(self, contestant: Contestant, workload: Workload) -> Settings:
        return Settings(
            model=str(contestant.model),
            dtype=self.dtype,
            quantization=self.quantization,
            num_slots=workload.num_slots,
            num_threads=self.threads,
            max_model_len=workload.max_model_len,
            max_batch_tokens=self.max_batch_tokens,
            speculation=self.speculation,
            draft_model=None if contestant.draft_model is None else str(contestant.draft_model),
            acceptance=self.acceptance,
        )


def main() -> None:
    arguments = _parser().parse_args()
    console = Console(highlight=False)
    if arguments.install:
        for name in _names(arguments.install, PEERS):
            console.print(f"installing {PEERS[name].title}")
            install(PEERS[name], arguments.threads)
        return
    if (arguments.draft_model is None) == (arguments.speculation == "draft"):
        raise SystemExit("--speculation draft and --draft-model need each other")
    if arguments.acceptance is not None and arguments.draft_model is None:
        raise SystemExit("--acceptance needs a --draft-model")
    plan = Plan(
        arguments.model,
        arguments.dtype,
        arguments.quantization,
        arguments.rounds,
        arguments.threads,
        arguments.max_batch_tokens,
        arguments.speculation,
        arguments.draft_model,
        arguments.acceptance,
    )
    names = _names(arguments.peers, PEERS)
    contestants, left_out = enter(names if arguments.without_us else [OURS, *names], plan, console)
    cells = []
    for name in _names(arguments.workloads, WORKLOADS):
        cells.append(run_cell(WORKLOADS[name], contestants, left_out, plan, console))
        console.print("", rich_table(cells[-1]), "")
    setting = {
        "rounds": str(plan.rounds),
        "threads": str(plan.threads),
        **({} if plan.speculation is None else {"speculation": plan.speculation}),
        **({} if plan.acceptance is None else {"acceptance": str(plan.acceptance)}),
    }
    model = "-".join(filter(None, [Path(plan.model).name, plan.speculation]))
    comparison = Comparison(model, plan.dtype, plan.quantization, setting, describe_machine(), cells)
    for path in write_report(comparison, arguments.output_folder):
        console.print(f"wrote {path}")


def enter(names: Sequence[str], plan: Plan, console: Console) -> tuple[list[Contestant], dict[str, str]]:
    """Return the peers that take part, with prepared models; and those that do not, with the reasons."""
    folders = [model_folder(each) for each in (plan.model, plan.draft_model) if each is not None]
    contestants, left_out = [], dict[str, str]()
    for peer in (PEERS[name] for name in dict.fromkeys(names)):
        if (plan.dtype, plan.quantization) not in peer.precisions:
            precision = " ".join(filter(None, [plan.dtype, plan.quantization]))
            left_out[peer.name] = f"it does not run in {precision} on a CPU"
        elif plan.speculation is not None and plan.speculation not in peer.speculations:
            left_out[peer.name] = f"its runner has no speculation {plan.speculation!r}"
        elif not peer.is_installed:
            left_out[peer.name] = f"it is not installed (python benchmarks/compare.py --install {peer.name})"
        else:
            try:
                with console.status(f"preparing the model for {peer.title}"):
                    models = [prepare(peer, each, plan.dtype, plan.quantization) for each in folders]
                contestants.append(Contestant(peer, *models))
                continue
            except (OSError, RuntimeError) as error:
                left_out[peer.name] = f"its model cannot be made: {error}"
        console.print(f"[yellow]{peer.title} is left out: {left_out[peer.name]}")
    return contestants, left_out


def run_cell(
    workload: Workload, contestants: Sequence[Contestant], left_out: dict[str, str], plan: Plan, console: Console
) -> CellResult:
    """Run one workload: load all peers, warm them up, run the rounds. A peer that fails is left out afterwards."""
    left_out, runners = dict(left_out), dict[str, Runner]()
    rounds: dict[str, list[Measured]] = {}

    def drop(name: str, error: RunnerError) -> None:
        left_out[name] = str(error)
        if name in runners:
            runners.pop(name).close()
        console.print(f"[yellow]{workload.name}: {PEERS[name].title} is left out: {error}")

    with ExitStack() as stack:
        for contestant in contestants:
            name = contestant.peer.name
            settings, log = plan.settings(contestant, workload), LOGS / f"{name}.log"
            try:
                with console.status(f"{workload.name}: {contestant.peer.title} loads and warms up"):
                    runners[name] = stack.enter_context(Runner(contestant.command, settings, log))
                    runners[name].run(workload.requests(WARM_UP_ROUND))
                rounds[name] = []
            except RunnerError as error:
                drop(name, error)
        for number in range(plan.rounds):
            requests = workload.requests(number)
            for name in in_turn(list(runners), number):
                try:
                    with console.status(f"{workload.name}, round {number + 1} of {plan.rounds}: {PEERS[name].title}"):
                        measured = runners[name].run(requests)
                except RunnerError as error:
                    drop(name, error)
                    continue
                rounds[name].append(measured)
                speed = workload.num_output_tokens / measured.seconds
                busy = measured.cores_of_others
                warning = f"[yellow] while others took {busy:.1f} cores" if busy > QUIET else ""
                console.print(f"{workload.name}, round {number + 1}: {PEERS[name].title} {speed:.1f} tokens/s{warning}")
        runs = [PeerRuns(name, runner.loaded, rounds[name]) for name, runner in runners.items()]
    return CellResult(
        workload=workload.name,
        description=workload.description,
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        num_slots=workload.num_slots,
        runs=runs,
        left_out=left_out,
    )


def in_turn(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order of a round: the peer that was first in the last round is last in this one."""
    shift = round_number % max(1, len(names))
    return [*names[shift:], *names[:shift]]


def describe_machine() -> dict[str, str]:
    """Describe the machine on which the figures were measured."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
        wide = [
            flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags
        ]
        processor += f" ({', '.join(wide)})" if wide else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers, workloads = ",".join(name for name in PEERS if name != OURS), ",".join(WORKLOADS)
    parser.add_argument(
        "--model",
        default="gpt2",
        help="gpt2, qwen3-0.6b, llama-3.2-1b, qwen3-moe (shapes, random weights) or a model's folder",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    kinds = sorted({kind for peer in PEERS.values() for _, kind in peer.precisions if kind})
    parser.add_argument("--quantization", choices=kinds, help="quantization of the weights")
    parser.add_argument("--peers", default=peers, help=f"a comma-separated selection from {peers}")
    parser.add_argument(
        "--workloads", default=",".join(USUAL_WORKLOADS), help=f"a comma-separated selection from {workloads}"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each engine")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="the token budget of a step")
    parser.add_argument(
        "--speculation", choices=("ngram", "draft"), help="what proposes draft tokens (default: nothing)"
    )
    parser.add_argument("--draft-model", help="with --speculation draft: like --model, such as qwen3-draft")
    parser.add_argument("--acceptance", type=float, help="with a draft model: the share of its tokens that are right")
    parser.add_argument("--without-us", action="store_true", help="run only the peers")
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    parser.add_argument("--install", metavar="PEERS", help="make these peers' environments and exit")
    return parser


def _names(text: str, known: Mapping[str, object]) -> list[str]:
    """Split comma-separated names; exit at an unknown one."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no {', '.join(unknown)}; known are {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
