"""The promise holds while all kinds of sharing are in use at the same time.

Common prefixes that arrive together, a second turn on the first one's whole output, prompts with several sequences
(forks), salts, priorities that preempt, and requests that are aborted at any moment.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.engine import Engine
from tests import others, zoo
from tests.exactness.harness import (
    Reference,
    Run,
    Teacher,
    assert_exact,
    has_windows,
    is_clear,
    make_reference,
    measure,
    num_blocks_for,
)

NUM_FIRST, NUM_SECOND = 30, 10


@cache
def turns(name: str) -> tuple[list[Reference], list[Reference]]:
    """Requests that share prefixes of many lengths, some of them identical, and second turns of the first ten."""
    model, rng = others.build(name), random.Random(name)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(zoo.VOCAB_SIZE) for _ in range(count)]

    prefixes = [tokens(length) for length in (0, 16, 33, 48, 60)]

    def request(prompt: list[int], num_tokens: int) -> Reference:
        while not is_clear(made := make_reference(name, model, prompt, tokens(num_tokens))):
            pass
        return made

    first = [
        request(prefixes[number % 5] + tokens(rng.choice((1, 2, 16, 30))), rng.randint(2, 16))
        for number in range(NUM_FIRST - 4)
    ]
    first += first[:4]
    seconds = [each.prompt + each.tokens + tokens(rng.randint(1, 8)) for each in first[:NUM_SECOND]]
    return first, [request(prompt, rng.randint(1, 12)) for prompt in seconds]


@dataclass
class Sharing(Run):
    """The results of a run, and how much was shared in it."""

    num_copies: int = 0
    num_cached_tokens: int = 0
    num_aborted: int = 0


def run_everything(name: str, seed: int, **options: Any) -> Sharing:
    """Serve both turns with random `n`, priorities, salts and aborts, and check every row of logits."""
    first, second = turns(name)
    lessons, rng, run = [*first, *second], random.Random(seed), Sharing(num_requests=NUM_FIRST + NUM_SECOND)
    engine = Engine(others.build(name), EngineConfig(policy="priority", aging_steps=20, speculation="off", **options))
    teacher, run_plan = Teacher(lessons), engine.runner.run
    engine.runner.sampler = teacher  # type: ignore[assignment]

    def count_copies(plan: StepPlan, masks: Any) -> StepTokens:
        run.num_copies += len(plan.copies)
        return run_plan(plan, masks)

    engine.runner.run = count_copies  # type: ignore[method-assign]
    counts = [rng.choice((1, 1, 2, 4)) for _ in lessons]
    aborted = set(rng.sample(range(len(lessons)), 6))
    for turn in (range(NUM_FIRST), range(NUM_FIRST, len(lessons))):
        for number in turn:
            lesson = lessons[number]
            params = SamplingParams(
                temperature=0, n=counts[number], max_tokens=len(lesson.tokens), seed=number, ignore_eos=True
            )
            salt = "somebody else's" if number % 11 == 5 else None
            accepted = engine.inputs.accept(
                str(number), lesson.prompt, params, priority=rng.randint(0, 3), cache_salt=salt
            )
            engine.submit(accepted)
        finish(engine, run, [number for number in turn if number in aborted], rng)
    run.num_preemptions = engine.scheduler.count.preemptions
    run.num_cached_tokens = engine.scheduler.reuse.num_cached_tokens
    engine.scheduler.block_pool.check([])
    for number, lesson in enumerate(lessons):
        for index in range(counts[number]):
            rows = teacher.logits[number, index]
            expected = len(rows) if number in aborted else len(lesson.tokens)
            assert sorted(rows) == list(range(expected)), "every output position is computed exactly once"
            if rows:
                measure(run, number, lesson, rows)
    return run


def finish(engine: Engine, run: Sharing, to_abort: Sequence[int], rng: random.Random) -> None:
    """Step until every sequence is done, and abort the given ones at random moments."""
    abort_at = {number: rng.randint(0, 30) for number in to_abort}
    num_steps = 0
    while engine.has_unfinished_requests:
        for number, step in abort_at.items():
            if step == num_steps:
                run.num_aborted += bool(engine.abort(str(number)))
        for output in engine.step():
            assert output.error is None, output.error
        num_steps += 1


HYBRIDS = ("qwen3_next", "falcon_h1")
"""With recurrent states, which continue from checkpoints."""


def in_turn(*pairs: tuple[int, int]) -> list[tuple[str, int, int]]:
    """Two of three pairs for each model, with different ones for the next model."""
    return [
        (name, *pair)
        for number, name in enumerate((*zoo.ARCHITECTURES, *HYBRIDS))
        for place, pair in enumerate(pairs)
        if (number + place) % 3
    ]


@pytest.mark.parametrize(("name", "budget", "block_size"), in_turn((8, 16), (64, 4), (2048, 16)))
@pytest.mark.thorough("llama", "gemma3", "mixtral")
def test_exact_with_all_kinds_of_sharing_in_a_roomy_cache(name: str, budget: int, block_size: int) -> None:
    run = run_everything(
        name, seed=budget, max_num_batched_tokens=budget, block_size=block_size, num_blocks=4096, max_num_seqs=12
    )
    assert_exact(run)
    assert run.num_cached_tokens > 1000
    assert (run.num_copies > 0) == (name not in HYBRIDS)
    assert run.num_aborted > 0


@pytest.mark.parametrize(("name", "budget", "block_size"), in_turn((12, 4), (64, 16), (2048, 1)))
@pytest.mark.thorough("llama", "gemma2", "gpt_oss", "deepseek", "phi3_longrope")
def test_exact_with_all_kinds_of_sharing_in_a_tight_cache(name: str, budget: int, block_size: int) -> None:
    run = run_everything(
        name,
        seed=budget,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=num_blocks_for(name, 160, block_size=block_size, budget=budget),
        max_num_seqs=12,
    )
    assert_exact(run)
    assert run.num_cached_tokens > 0
    assert run.num_preemptions > 0 or (budget == 2048 and has_windows(name))
    assert (run.num_copies > 0) == (block_size > 1 and name not in HYBRIDS)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_exact_without_a_prefix_cache(name: str) -> None:
    run = run_everything(name, seed=1, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=12)
    assert_exact(run)
    assert run.num_copies > 0
