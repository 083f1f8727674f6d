"""Times of a step's phases: reads a clock before and after each of five calls.

A step is `Engine.step`: plan, run (pack the batch, forward pass, sample), commit. Knows these calls only by name.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from inflight.engine.engine import Engine


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
