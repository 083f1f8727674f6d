"""Whole workloads: with any sharing, forks, waiting and preemption, each request gets the same output as alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from inflight.contracts.api.config import BACKGROUND
from tests.properties.expected import Sizes
from tests.properties.invariants import check
from tests.properties.world import World

Outcome = dict[tuple[str, int], tuple[list[int], str]]
"""For each request and index, the output and the finish reason."""


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    max_output: int
    num_sequences: int
    stop_token: int
    min_output: int
    priority: int


def next_token(past: list[int]) -> int:
    """A model whose next token depends on every previous token and on their order."""
    return sum((position + 1) * token for position, token in enumerate(past)) % 11


def run_to_the_end(jobs: list[Job], sizes: Sizes, num_steps_between: int = 0) -> tuple[Outcome, World]:
    """Serve the jobs, which arrive at regular intervals of steps; each token is computed from the content of the
    cache."""
    world = World(sizes)
    to_come = list(jobs)
    num_steps = 0
    while to_come or world.unfinished:
        if to_come and num_steps >= num_steps_between * (len(jobs) - len(to_come)):
            job = to_come.pop(0)
            world.submit(
                job.prompt,
                job.max_output,
                num_sequences=job.num_sequences,
                stop_token_ids=frozenset({job.stop_token}),
                min_output=job.min_output,
                priority=job.priority,
            )
            continue
        num_steps += 1
        world.plan()
        if world.in_flight is not None:  # the cache is checked to hold these pasts before they are committed
            world.commit([[next_token([token for _, token, _, _ in past])] for past in world.pasts])
        check(world)
    outcomes = dict(world.outcomes)
    world.drain()
    return outcomes, world


def one_by_one(jobs: list[Job], capacity: int) -> Outcome:
    """The expected outputs: each job is computed alone, without a scheduler."""
    outcome: Outcome = {}
    for number, job in enumerate(jobs):
        past, reason = list(job.prompt), ""
        while not reason:
            past.append(next_token(past))
            num_output = len(past) - len(job.prompt)
            if past[-1] == job.stop_token and num_output >= job.min_output:
                reason = "stop"
            elif num_output == job.max_output or len(past) == capacity:
                reason = "length"
        for index in range(job.num_sequences):
            outcome[f"request {number}", index] = (past[len(job.prompt) :], reason)
    return outcome


def make_jobs(draw: Callable[[int, int], int], num_jobs: int, capacity: int) -> list[Job]:
    """Jobs that each fit the cache alone, many with a common prefix; `draw(low, high)` chooses."""
    jobs = []
    for number in range(num_jobs):
        common = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8]][draw(0, 1)][: draw(0, 10)]
        prompt = [*common, *((5 * number + 3 * position) % 17 for position in range(draw(1, 4)))][: capacity - 1]
        jobs.append(
            Job(
                prompt=prompt,
                max_output=draw(1, 30),
                num_sequences=draw(1, 3),
                stop_token=draw(0, 40),  # often no token that the model can give
                min_output=draw(0, 3),
                priority=[-1, 0, 1, 2, BACKGROUND][draw(0, 4)],
            )
        )
    return jobs


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_random_workload_in_a_tiny_cache_gives_every_request_the_same_output_as_alone(
    randomness: random.Random,
) -> None:
    draw = randomness.randint
    windows = [(None,), (None, 4), (None, 2, 9), (5,)][draw(0, 3)]
    sizes = Sizes(
        windows=windows,
        num_blocks=draw(1, 16) * len(windows),
        block_size=draw(1, 4),
        max_num_seqs=draw(1, 6),
        budget=draw(1, 24),
        max_prefill=[None, 1, 3, 8][draw(0, 3)],
        background_tokens=[0, 0, 1, 4][draw(0, 3)],
        aging_steps=[None, 1, 3, 10][draw(0, 3)],
        prefix_caching=draw(0, 3) > 0,
        recompute_beyond=[None, 4, 11][draw(0, 2)],
    )
    jobs = make_jobs(draw, num_jobs=draw(1, 10), capacity=sizes.capacity)
    outcome, world = run_to_the_end(jobs, sizes, num_steps_between=draw(0, 3))
    assert outcome == one_by_one(jobs, sizes.capacity)
    for name, count in world.reached.items():
        if count:
            event(name)


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_cache_preempts_and_gives_the_same_outputs_as_a_huge_one(seed: int) -> None:
    tiny = Sizes(num_blocks=8, block_size=3, max_num_seqs=6, budget=16)
    huge = replace(tiny, num_blocks=1000)
    jobs = [
        replace(job, max_output=min(job.max_output, tiny.capacity - len(job.prompt)))
        for job in make_jobs(random.Random(seed).randint, num_jobs=12, capacity=tiny.capacity)
    ]
    in_tiny, tiny_world = run_to_the_end(jobs, tiny)
    in_huge, huge_world = run_to_the_end(jobs, huge)
    assert tiny_world.scheduler.count.preemptions > 0
    assert huge_world.scheduler.count.preemptions == 0
    assert in_tiny == in_huge == one_by_one(jobs, tiny.capacity)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("windows", [(None,), (None, 5, 5), (4,)])
def test_sharing_saves_computing_and_changes_no_output(seed: int, windows: tuple[int | None, ...]) -> None:
    sharing = Sizes(num_blocks=1000, block_size=3, max_num_seqs=6, budget=16, windows=windows)
    jobs = make_jobs(random.Random(seed).randint, num_jobs=12, capacity=sharing.capacity)
    shared, with_cache = run_to_the_end(jobs, sharing)
    plain, without_cache = run_to_the_end(jobs, replace(sharing, prefix_caching=False))
    assert shared == plain == one_by_one(jobs, sharing.capacity)
    assert with_cache.scheduler.reuse.num_cached_tokens > without_cache.scheduler.reuse.num_cached_tokens
