"""`load_test`: one load test, from its plan to its report. Decides only the order of the steps."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from inflight.loadtest.dialect import VOCAB_SIZES, Dialect, Target, find_dialect
from inflight.loadtest.openai_client import OpenAIClient
from inflight.loadtest.processes import run_in_processes
from inflight.loadtest.report import LoadReport, Objectives, report_of
from inflight.loadtest.runner import Clock, LoadRequest, RequestRecord, Tally, run_load
from inflight.loadtest.workloads import Sketch, write_prompts

PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process, its living descendants and its dead children.

    Raises:
        ValueError: there is no such process, or no `/proc`.
    """
    if not (PROC / "self" / "stat").exists():
        raise ValueError("the server's CPU time is read from /proc, which this system does not have")
    stats = {int(entry.name): _fields(entry) for entry in PROC.iterdir() if entry.name.isdigit()}
    if not stats.get(pid):
        raise ValueError(f"there is no process {pid}")
    family, size = {pid}, 0
    while len(family) > size:  # until no new descendants are found
        size = len(family)
        family |= {child for child, fields in stats.items() if fields and int(fields[1]) in family}
    # user and system time, and both for children that were waited for
    ticks = sum(int(ticks) for member in family for ticks in stats[member][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields(process: Path) -> list[str]:
    """Return the fields of `stat` from the third (state) on; none if the process has just ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def arrival_times(
    num_requests: int, rate: float, *, burstiness: float = 1.0, burst_size: int = 1, seed: int = 0
) -> list[float]:
    """Return when requests arrive, in seconds after the start, the first at 0.

    Args:
        rate: requests per second, on average; infinity: all at once.
        burstiness: the shape of the gamma distribution of the gaps. 1: requests arrive independently of each other
            (Poisson); below 1: in clusters; above 1: more evenly.
        burst_size: how many requests arrive together; the gaps are between such bursts.

    Raises:
        ValueError: an argument is not above 0.
    """
    for name, value in (("the request rate", rate), ("the burstiness", burstiness), ("the burst size", burst_size)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if math.isinf(rate):
        return [0.0] * num_requests
    num_bursts = math.ceil(num_requests / burst_size)
    mean_gap = burst_size / rate
    gaps = np.random.default_rng((seed, 1)).gamma(burstiness, mean_gap / burstiness, max(0, num_bursts - 1))
    starts: list[float] = np.concatenate(([0.0], np.cumsum(gaps))).tolist()
    return [starts[number // burst_size] for number in range(num_requests)]


PromptKind: TypeAlias = Literal["auto", "ids", "words"]
WARMUP_TOKENS = 16
"""Length of warm-up prompts if the real ones come from a file, which must not be in a prefix cache yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of a load test.

    Attributes:
        sketches: the requests; those without an arrival time get one.
        num_prefix_tokens, num_prefixes: length of the prefix that random prompts share, and how many there are.
        prompt_kind: what random prompts are: token ids, words, or token ids if the server accepts them ("auto").
        vocab_size: token ids are below this; None: found out by probing.
        request_rate, burstiness, burst_size: as for `arrival_times`.
        max_concurrency: most requests in flight; None: no limit.
        num_processes: how many processes send them.
        num_warmups: how many requests are answered before the run begins.
        timeout: seconds after which a request counts as failed.
        seed: for prompts and arrivals. The same plan sends the same requests to all servers that take the same kind.
        objectives: for goodput.
        server_pid: the process whose CPU time is measured.

    Raises:
        ValueError: there are more processes than requests at a time.
    """

    sketches: Sequence[Sketch]
    num_prefix_tokens: int = 0
    num_prefixes: int = 1
    prompt_kind: PromptKind = "auto"
    vocab_size: int | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    burst_size: int = 1
    max_concurrency: int | None = None
    num_processes: int = 1
    num_warmups: int = 0
    timeout: float = 600.0
    seed: int = 0
    objectives: Objectives | None = None
    server_pid: int | None = None

    def __post_init__(self) -> None:
        most = len(self.sketches) if self.max_concurrency is None else self.max_concurrency
        if self.num_processes > most:
            raise ValueError(f"there are {self.num_processes} processes for {most} requests at a time")

    def vocab_sizes(self, target: Target) -> list[int | None]:
        """Return the limits of token ids to try with the server, in this order; None: text."""
        has_random_prompts = any(isinstance(sketch.prompt, int) for sketch in self.sketches)
        if target.endpoint == "chat" or self.prompt_kind == "words" or not has_random_prompts:
            return [None]
        sizes = VOCAB_SIZES if self.vocab_size is None else (self.vocab_size,)
        return [*sizes, None] if self.prompt_kind == "auto" else [*sizes]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load test: the server's supported fields, a record of each request, and the report."""

    dialect: Dialect
    records: list[RequestRecord]
    report: LoadReport


async def load_test(
    client: OpenAIClient,
    target: Target,
    plan: LoadPlan,
    *,
    say: Callable[[str], None] = lambda line: None,
    watch: Callable[[Tally], None] = lambda tally: None,
    clock: Clock | None = None,
) -> LoadResult:
    """Detect the server's supported fields, send the planned requests, and measure.

    Args:
        say: receives notes for readers of the report.
        watch: receives the progress of the run, unless several processes send it.

    Raises:
        ServerError: the server cannot be reached, or refuses the first request in every dialect.
        ValueError: the endpoint does not take a prompt, or there is no process `server_pid`.
    """
    dialect = await find_dialect(client, target, plan.vocab_sizes(target), plan.timeout)
    _say_what_differs(dialect, plan, target, say)
    requests = _requests(plan, target, dialect)
    if plan.num_warmups:
        await run_load(client, target.path, _warmups(plan, target, dialect), timeout=plan.timeout)
    server_before = None if plan.server_pid is None else cpu_seconds(plan.server_pid)
    client_before = time.process_time()
    if plan.num_processes > 1:
        records, client_cpu = await asyncio.to_thread(
            run_in_processes,
            client,
            target.path,
            requests,
            plan.num_processes,
            max_concurrency=plan.max_concurrency,
            timeout=plan.timeout,
        )
    else:
        records = await run_load(
            client,
            target.path,
            requests,
            max_concurrency=plan.max_concurrency,
            timeout=plan.timeout,
            clock=clock,
            watch=watch,
        )
        client_cpu = time.process_time() - client_before
    server_cpu = None
    if plan.server_pid is not None and server_before is not None:
        server_cpu = cpu_seconds(plan.server_pid) - server_before
    report = report_of(
        records,
        [request.num_output_tokens for request in requests],
        objectives=plan.objectives,
        server_cpu_seconds=server_cpu,
        client_cpu_seconds=client_cpu,
    )
    return LoadResult(dialect, records, report)


def _requests(plan: LoadPlan, target: Target, dialect: Dialect) -> list[LoadRequest]:
    """Return all requests in order of arrival, fully encoded ahead of time."""
    prompts = write_prompts(
        plan.sketches,
        num_prefix_tokens=plan.num_prefix_tokens,
        num_prefixes=plan.num_prefixes,
        vocab_size=dialect.vocab_size,
        seed=plan.seed,
    )
    arrivals = arrival_times(
        len(prompts), plan.request_rate, burstiness=plan.burstiness, burst_size=plan.burst_size, seed=plan.seed
    )
    requests = [
        LoadRequest(
            arrival if sketch.arrival is None else sketch.arrival,
            dialect.body(target, prompt, sketch.num_output_tokens),
            sketch.num_output_tokens,
            len(prompt) if isinstance(prompt, list) and target.endpoint == "completions" else None,
        )
        for sketch, prompt, arrival in zip(plan.sketches, prompts, arrivals, strict=True)
    ]
    return sorted(requests, key=lambda request: request.arrival)


def _warmups(plan: LoadPlan, target: Target, dialect: Dialect) -> list[LoadRequest]:
    """Return warm-up requests: the same lengths, all at once, with other prompts, which no prefix cache can reuse."""
    sketches = [
        Sketch(sketch.prompt if isinstance(sketch.prompt, int) else WARMUP_TOKENS, sketch.num_output_tokens)
        for sketch in plan.sketches[: plan.num_warmups]
    ]
    prompts = write_prompts(
        sketches, num_prefix_tokens=plan.num_prefix_tokens, vocab_size=dialect.vocab_size, seed=-1 - plan.seed
    )
    return [
        LoadRequest(0.0, dialect.body(target, prompt, sketch.num_output_tokens), sketch.num_output_tokens)
        for sketch, prompt in zip(sketches, prompts, strict=True)
    ]


def _say_what_differs(dialect: Dialect, plan: LoadPlan, target: Target, say: Callable[[str], None]) -> None:
    tried = plan.vocab_sizes(target)
    if dialect.vocab_size != tried[0]:
        what = "words: it takes no token ids" if dialect.vocab_size is None else f"token ids below {dialect.vocab_size}"
        say(f"the server gets prompts of {what}")
    if not dialect.takes_ignore_eos:
        say("the server does not take ignore_eos: answers may be shorter than requested")
    if not dialect.takes_stream_options:
        say("the server does not take stream_options: chunks are counted, unless it counts tokens anyway")


def as_rows(records: Sequence[RequestRecord]) -> list[dict[str, object]]:
    """Return each record for JSON, with the times of its chunks."""
    return [{**asdict(record), "token_times": list(record.token_times)} for record in records]
