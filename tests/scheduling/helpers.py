"""Helpers for the scheduler tests. Sequences are numbered in the order of submission."""

from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from typing import Any

from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup, CacheLayout
from inflight.contracts.step.plan import StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.scheduler import Limits, Progress, Scheduler
from inflight.scheduling.sequence import Request

TOKEN = 7
"""The token that the model of these tests always gives."""


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 1,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    enable_prefix_caching: bool = False,
    cache_groups: SequenceOf[CacheGroup] = (ALL_TOKENS,),
    **options: Any,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, CacheLayout(block_size, cache_groups, max_num_batched_tokens)),
        Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **{field.name: options.pop(field.name) for field in fields(Limits) if field.name in options},
        ),
        enable_prefix_caching=enable_prefix_caching,
        **options,
    )


def submit(
    scheduler: Scheduler, request_id: str, prompt: int | SequenceOf[int], max_output: int = 50, **options: Any
) -> None:
    """Queue a request; an integer prompt stands for that number of tokens, the same in every prompt."""
    prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    scheduler.submit(Request(request_id, prompt, len(prompt) + max_output, **options))


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int = TOKEN) -> list[Progress]:
    return scheduler.commit(plan, [[token] * span.num_logit_rows for span in plan.spans])


def step(scheduler: Scheduler, token: int = TOKEN) -> list[tuple[int, int, int]]:
    """Run a step, and return its spans."""
    plan = plan_of(scheduler)
    commit(scheduler, plan, token)
    return spans_of(plan)


def spans_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """The sequence, start and end of each span."""
    return [(span.sequence_id, span.start, span.end) for span in plan.spans]


def tables_of(plan: StepPlan) -> dict[int, list[int]]:
    """The blocks of each sequence."""
    return {span.sequence_id: list(table) for span, table in zip(plan.spans, plan.tables[0], strict=True)}


def slots_of(plan: StepPlan) -> dict[int, int]:
    """The slot of each sequence."""
    return {span.sequence_id: span.slot for span in plan.spans}


def run_to_the_end(scheduler: Scheduler, max_num_steps: int = 1000) -> int:
    """Run steps until no sequence is left, and return how many steps ran."""
    for num_steps in range(max_num_steps + 1):
        if scheduler.num_running + scheduler.num_waiting == 0:
            return num_steps
        step(scheduler)
    raise AssertionError(f"not finished after {max_num_steps} steps")


def waiting(scheduler: Scheduler) -> list[int]:
    """The ids of the waiting sequences."""
    return [sequence.sequence_id for sequence in scheduler.unfinished() if sequence.slot is None]


def full_cache() -> Scheduler:
    """Three sequences that fill a cache of 9 blocks of one token, and a fourth that waits."""
    scheduler = make_scheduler(num_blocks=9)
    for name in "abc":
        submit(scheduler, name, 2, max_output=6)
    submit(scheduler, "d", 4, max_output=1)
    assert step(scheduler) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert step(scheduler) == [(0, 2, 3), (1, 2, 3), (2, 2, 3)]
    assert scheduler.block_pool.num_available == 0
    return scheduler
