"""One load test from its plan to its report. Decides the order of things, and knows none of them closely."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from inflight.loadtest.arrivals import arrival_times
from inflight.loadtest.cpu_time import cpu_seconds
from inflight.loadtest.dialect import VOCAB_SIZES, Dialect, Target, find_dialect
from inflight.loadtest.prompts import write_prompts
from inflight.loadtest.report import LoadReport, Objectives, report_of
from inflight.loadtest.runner import Clock, LoadRequest, Record, Tally, run_load
from inflight.loadtest.sketch import Sketch
from inflight.openai_client import OpenAIClient

PromptKind: TypeAlias = Literal["auto", "ids", "words"]
WARMUP_TOKENS = 16
"""A warm-up's prompt, where the real ones come from a file: they themselves must not be in a prefix cache yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send, and when.

    Attributes:
        sketches: the requests; those without an arrival of their own get one.
        num_prefix_tokens: that all random prompts have in common, before their own.
        prompt_kind: what random prompts are: token ids, words, or token ids where the server takes them ("auto").
        vocab_size: token ids are below this; None: found out by asking.
        request_rate, burstiness, burst_size: of `arrival_times`.
        max_concurrency: so many requests are under way at most; None: no limit.
        num_warmups: so many requests are answered before the run begins.
        timeout: seconds after which a request has failed.
        seed: of prompts and arrivals. The same plan sends the same requests to any server that takes the same kind.
        objectives: for goodput.
        server_pid: whose CPU time to measure.
    """

    sketches: Sequence[Sketch]
    num_prefix_tokens: int = 0
    prompt_kind: PromptKind = "auto"
    vocab_size: int | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    burst_size: int = 1
    max_concurrency: int | None = None
    num_warmups: int = 0
    timeout: float = 600.0
    seed: int = 0
    objectives: Objectives | None = None
    server_pid: int | None = None

    def vocab_sizes(self, target: Target) -> list[int | None]:
        """What to try with the server, in this order; None: text."""
        has_random_prompts = any(isinstance(sketch.prompt, int) for sketch in self.sketches)
        if target.endpoint == "chat" or self.prompt_kind == "words" or not has_random_prompts:
            return [None]
        sizes = VOCAB_SIZES if self.vocab_size is None else (self.vocab_size,)
        return [*sizes, None] if self.prompt_kind == "auto" else [*sizes]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load test that was run: what the server takes, what became of each request, and all that in numbers."""

    dialect: Dialect
    records: list[Record]
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
    """Find out what the server takes, send what is planned, and measure.

    Args:
        say: is told in a line what a reader of the report should know.
        watch: is told how far the run is.

    Raises:
        ServerError: the server can't be reached, or refuses a first request in every way.
        ValueError: an endpoint has no place for a prompt, or there is no process `server_pid`.
    """
    dialect = await find_dialect(client, target, plan.vocab_sizes(target), plan.timeout)
    _say_what_differs(dialect, plan, target, say)
    requests = _requests(plan, target, dialect)
    if plan.num_warmups:
        await run_load(client, target.path, _warmups(plan, target, dialect), timeout=plan.timeout)
    server_before = None if plan.server_pid is None else cpu_seconds(plan.server_pid)
    client_before = time.process_time()
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
    """In order of arrival, each written out, so that nothing is left to be done when it is due."""
    prompts = write_prompts(
        plan.sketches, num_prefix_tokens=plan.num_prefix_tokens, vocab_size=dialect.vocab_size, seed=plan.seed
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
    """Of the same lengths, at once, with other prompts: what they leave in a prefix cache helps nobody."""
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
        say("the server does not take ignore_eos: answers may be shorter than asked for")
    if not dialect.takes_stream_options:
        say("the server does not take stream_options: unless it counts tokens all the same, chunks are counted")


def as_rows(records: Sequence[Record]) -> list[dict[str, object]]:
    """Each request for JSON, its chunks' times too."""
    return [{**asdict(record), "token_times": list(record.token_times)} for record in records]
