"""What the scheduler costs: a step with many running and many more waiting sequences, and the prefix cache per token.

python benchmarks/scheduler_cost.py
"""

import gc
import platform
import random
import statistics
import time
from array import array

from inflight.contracts.step.cache_layout import CacheLayout
from inflight.contracts.step.plan import StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.scheduling.sequence import Request

NUM_RUNNING = 256
NUM_WAITING = 10_000
PROMPT_LEN = 64
NUM_STEPS = 300
AGING_STEPS = 100
BLOCK_SIZE = 16
NUM_CACHED_BLOCKS = 100_000
LONG_PROMPT_LEN = 4096
GOAL_MS_PER_STEP = 0.8
GOAL_US_PER_TOKEN = 1.0


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    print(f"plan + commit, {NUM_RUNNING} running decodes, {NUM_WAITING:,} waiting (goal: {GOAL_MS_PER_STEP} ms):")
    for name, aging_steps in [("first come, first served", None), ("priorities, aging", AGING_STEPS)]:
        plans, commits = step_seconds(aging_steps)
        both = [1e3 * (a + b) for a, b in zip(plans, commits, strict=True)]
        print(
            f"  {name:25} median {statistics.median(both):.3f} ms "
            f"(plan {1e3 * statistics.median(plans):.3f}, commit {1e3 * statistics.median(commits):.3f}), "
            f"99 % within {statistics.quantiles(both, n=100)[98]:.3f} ms"
        )
    look_up, registration = prefix_seconds()
    print(f"prefix cache of {NUM_CACHED_BLOCKS:,} blocks, per prompt token (goal: {GOAL_US_PER_TOKEN} µs):")
    print(f"  admission of a prompt that is found  {1e6 * look_up:.3f} µs")
    print(f"  admission of a prompt that is new    {1e6 * registration:.3f} µs")


def step_seconds(aging_steps: int | None) -> tuple[list[float], list[float]]:
    """Return the seconds of each plan and each commit, after all requests have arrived, a hundred per step."""
    num_blocks = NUM_RUNNING * (PROMPT_LEN + 2 * NUM_STEPS) // BLOCK_SIZE
    scheduler = Scheduler(
        BlockPool(num_blocks, CacheLayout(BLOCK_SIZE)),
        Limits(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=16_384 + NUM_RUNNING),
        aging_steps=aging_steps,
    )
    for number in range(NUM_RUNNING + NUM_WAITING):
        prompt, priority = random_prompt(number, PROMPT_LEN), 0 if number < NUM_RUNNING else number % 3
        scheduler.submit(Request(str(number), prompt, PROMPT_LEN + 10 * NUM_STEPS, priority=priority))
        if number % 100 == 0:
            step(scheduler)
    plans, commits = [], []
    assert scheduler.num_running == NUM_RUNNING
    gc.collect()
    gc.freeze()
    for _ in range(NUM_STEPS):
        plan_seconds, commit_seconds, plan = step(scheduler)
        assert len(plan.spans) == plan.num_tokens == NUM_RUNNING
        plans.append(plan_seconds)
        commits.append(commit_seconds)
    gc.unfreeze()
    return plans, commits


def step(scheduler: Scheduler) -> tuple[float, float, StepPlan]:
    """Run a step; return the seconds of its plan and of its commit."""
    start = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    assert plan is not None
    tokens = [[7] * span.num_logit_rows for span in plan.spans]
    committing = time.perf_counter()
    scheduler.commit(plan, tokens)
    return planned - start, time.perf_counter() - committing, plan


def prefix_seconds() -> tuple[float, float]:
    """Return the seconds per prompt token for planning and committing a cached prompt, and an uncached one."""
    scheduler = Scheduler(
        BlockPool(NUM_CACHED_BLOCKS + 1000, CacheLayout(BLOCK_SIZE)),
        Limits(max_num_seqs=1, max_num_batched_tokens=LONG_PROMPT_LEN),
    )
    num_prompts = NUM_CACHED_BLOCKS * BLOCK_SIZE // LONG_PROMPT_LEN
    seconds: dict[str, list[float]] = {"new": [], "found": []}
    for kind in seconds:
        for number in range(num_prompts):
            prompt = random_prompt(number, LONG_PROMPT_LEN + 1 - (kind == "new"))
            scheduler.submit(Request(f"{kind} {number}", prompt, len(prompt) + 1))
            plan_seconds, commit_seconds, plan = step(scheduler)
            assert plan.num_tokens == (LONG_PROMPT_LEN if kind == "new" else 1)
            seconds[kind].append(plan_seconds + commit_seconds)
    assert scheduler.block_pool.num_cached >= NUM_CACHED_BLOCKS - 1000
    return statistics.median(seconds["found"]) / LONG_PROMPT_LEN, statistics.median(seconds["new"]) / LONG_PROMPT_LEN


def random_prompt(seed: int, length: int) -> "array[int]":
    """Return tokens that depend only on the seed; a longer prompt begins with a shorter one."""
    return array("i", random.Random(seed).choices(range(100_000), k=length))


if __name__ == "__main__":
    main()
