"""Times of a forward pass's operators by kind, from torch's profiler.

An operator counts as a linear layer, as experts or as attention by its name, or because it runs inside one; all others
are small operators, including the row kernels of a recorded forward pass, and what lies between their calls. Attention
backends whose operators have no telling names are marked. Time between operators is Python.

The profiler costs time at every operator, so the times of many small operators and of Python are too long.

Times of a step's phases: reads a clock before and after each of five calls.

A step is `Engine.step`: plan, run (pack the batch, forward pass, sample), commit. Knows these calls only by name.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from inflight.engine.engine import Engine
from inflight.execution.attention import CpuAttention
from inflight.execution.executors import PackedExecutor


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one step.

    Attributes:
        scheduler: plan and commit.
        packing: the runner's time besides the forward pass and sampling: it lays out the batch.
        engine: the rest: updates and outputs of requests.
    """

    scheduler: float
    packing: float
    forward: float
    sampler: float
    engine: float


def time_phases(engine: Engine, step: Callable[[], None]) -> PhaseTimes:
    """Run one step of `engine` with a clock at each phase."""
    runner, scheduler = engine.runner, engine.scheduler
    with ExitStack() as stack:

        def seconds_of(owner: object, method: str) -> list[float]:
            return stack.enter_context(timed_calls(owner, method))

        plan, commit = seconds_of(scheduler, "plan"), seconds_of(scheduler, "commit")
        run, forward = seconds_of(runner, "run"), seconds_of(runner.executor, "forward")
        sample = seconds_of(runner.sampler, "sample")
        start = time.perf_counter()
        step()
        whole = time.perf_counter() - start
    planning, running = sum(plan) + sum(commit), sum(run)
    return PhaseTimes(
        scheduler=planning,
        packing=running - sum(forward) - sum(sample),
        forward=sum(forward),
        sampler=sum(sample),
        engine=whole - planning - running,
    )


@contextmanager
def timed_calls(owner: object, method: str) -> Iterator[list[float]]:
    """Within the block, each call of a method of this one object appends its seconds to the list."""
    seconds: list[float] = []

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **options)
            seconds.append(time.perf_counter() - start)
            return result

        return timed

    with replaced_method(owner, method, around):
        yield seconds


@contextmanager
def replaced_method(
    owner: object, method: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within the block, a method of this one object is replaced by `around(method)`."""
    own = vars(owner).get(method)
    setattr(owner, method, around(getattr(owner, method)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, method)
        else:
            setattr(owner, method, own)


FORWARD, ATTENTION = "inflight forward pass", "inflight attention"
LINEAR_OPERATORS = {
    *("inflight::linear", "mkldnn::_linear_pointwise", "onednn::qlinear_pointwise", "mkl::_mkl_linear"),
    *("aten::linear", "aten::addmm", "aten::mm", "aten::_int_mm", "aten::_weight_int8pack_mm"),
}
EXPERT_OPERATORS = {"inflight::experts", "inflight::experts_up", "inflight::experts_down", "aten::_grouped_mm"}
ATTENTION_OPERATORS = {
    *("inflight::begin_step", "inflight::write", "inflight::attend"),
    *(ATTENTION, "aten::scaled_dot_product_attention"),
}
LARGE = ("linears", "experts", "attention")
"""Kinds of operators that take long enough to be measured under the profiler."""
QUIET = "6"
"""A log level above all messages that the profiler's library would write to standard error."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Seconds of one forward pass under the profiler; together they make up the whole pass.

    Attributes:
        python: time between operators: the model's own code, and ours.
    """

    linears: float
    experts: float
    attention: float
    small_operators: float
    python: float


@contextmanager
def marked_forward(executor: PackedExecutor) -> Iterator[None]:
    """Within the block, the executor's forward passes and, where necessary, its attention are marked in profiles."""

    with ExitStack() as stack:
        stack.enter_context(replaced_method(executor, "forward", record_function(FORWARD)))
        if not isinstance(executor.backend, CpuAttention):  # its operators have telling names
            for method in ("begin_step", "write", "attend"):
                stack.enter_context(replaced_method(executor.backend, method, record_function(ATTENTION)))
        yield


def profile_operators(executor: PackedExecutor, step: Callable[[], None], num_steps: int) -> list[OperatorTimes]:
    """Run steps of one forward pass each under the profiler, after one step that does not count."""
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with marked_forward(executor), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps + 1):
            step()
    events: Sequence[FunctionEvent] = profiler.events() or ()
    return [_times(event) for event in events if event.name == FORWARD][1:]


def _times(forward: FunctionEvent) -> OperatorTimes:
    seconds = dict.fromkeys((field.name for field in fields(OperatorTimes)), 0.0)
    _add_up(forward, "python", seconds)
    return OperatorTimes(**seconds)


def _add_up(event: FunctionEvent, kind: str, seconds: dict[str, float]) -> None:
    """Add an event's own time to its kind, and the times of all events inside it to theirs."""
    seconds[kind] += event.self_cpu_time_total * 1e-6
    for child in event.cpu_children:
        _add_up(child, kind if kind in LARGE else _kind(child.name), seconds)


def _kind(name: str) -> str:
    if name in LINEAR_OPERATORS:
        return "linears"
    if name in EXPERT_OPERATORS:
        return "experts"
    if name in ATTENTION_OPERATORS:
        return "attention"
    return "small_operators"
