"""Blocks are kept for sessions that will return: for how long, and from which requests."""

from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.cache_layout import CacheLayout
from inflight.scheduling import retention
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.retention import Retention, seconds_to_keep
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.simulate import StepCost
from inflight.simulate.requests import SimulatedRequest
from inflight.simulate.simulated_engine import SimulatedEngine
from tests.scheduling.helpers import run_to_the_end, step, submit


@given(st.lists(st.floats(0.1, 100) | st.just(inf), max_size=8), st.floats(0, 300))
def test_blocks_are_kept_for_as_long_as_it_pays_most(pauses: list[float], gain: float) -> None:
    def worth(seconds: float) -> float:
        return sum(gain - each if each <= seconds else -seconds for each in [*pauses, inf])

    chosen = seconds_to_keep(pauses, gain)
    assert chosen in (0.0, *pauses)
    assert worth(chosen) >= max(worth(each) for each in [0.0, *pauses] if each < inf) - 1e-9


class Clock:
    """Time that only the tests let pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A scheduler of ten blocks of one token each, which computes a token in a second, and its clock."""

    def __init__(self, num_blocks: int = 10, most_seconds: float = 30.0) -> None:
        self.clock, self.names = Clock(), map(str, count())
        pool = BlockPool(num_blocks, CacheLayout(1, max_span=100))
        keeping = Retention(pool, most_seconds, self.clock)
        keeping.observe_prefill(1, 1.0)
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=100)
        self.scheduler = Scheduler(pool, limits, retention=keeping)

    def run(self, prompt: list[int], **options: int) -> int:
        """Run a request of one output token to its end, and return how many tokens of its prompt were computed."""
        before = self.scheduler.reuse.num_cached_tokens
        submit(self.scheduler, next(self.names), prompt, max_output=1, **options)
        run_to_the_end(self.scheduler)
        return len(prompt) - (self.scheduler.reuse.num_cached_tokens - before)

    def begin(self, **options: int) -> None:
        """Run two turns of a session, a second apart; from then on its blocks are kept."""
        self.run(SESSION[:-1], **options)
        self.clock.now += 1
        self.run(SESSION, **options)

    def waits(self, prompt: list[int], **options: int) -> bool:
        """Submit a request when none runs; whether it does not start."""
        submit(self.scheduler, next(self.names), prompt, max_output=1, **options)
        return self.scheduler.plan() is None


SESSION, OTHER, LONG = [1, 2, 3, 4], [5, 6, 7], [9] * 8


def test_another_request_waits_for_the_blocks_of_a_session_until_it_has_returned() -> None:
    world = World()
    world.begin()
    assert world.waits(LONG)
    assert world.scheduler.block_pool.num_kept == 4
    world.clock.now += 2
    submit(world.scheduler, "again", [*SESSION, 0, 0], max_output=1)
    assert step(world.scheduler) == [(3, 4, 6)]  # nothing but the new tokens, and before the one that waits
    assert world.waits(LONG)


def test_a_session_is_recognised_whose_prompts_end_with_the_opening_of_an_answer() -> None:
    world, history, opening = World(num_blocks=30), list(range(10, 26)), [1, 2]
    world.run([*history, *opening])
    world.clock.now += 1
    history += [30, 31]
    world.run([*history, *opening])
    assert world.scheduler.block_pool.num_kept > len(history)
    world.run([*range(50, 60)])
    history += [32]
    assert world.run([*history, *opening]) == 3


def test_a_request_waits_no_longer_than_blocks_are_kept() -> None:
    world = World()
    world.begin()
    assert world.waits(LONG)
    # Little is known of pauses: they are kept for as long as computing them again takes.
    assert world.scheduler.idle_seconds == 5
    world.clock.now += 5
    assert step(world.scheduler) == [(2, 0, 8)]


def test_requests_do_not_wait_for_one_that_has_not_returned_yet() -> None:
    world = World()
    world.run(SESSION)
    submit(world.scheduler, "next", LONG, max_output=1)
    assert step(world.scheduler) == [(1, 0, 8)]


def test_a_request_waits_no_longer_than_the_limit_however_often_a_session_returns() -> None:
    world, prompt = World(num_blocks=100, most_seconds=30), SESSION
    world.begin()
    assert world.waits([9] * 97)
    begun = world.clock.now
    while world.scheduler.is_unfinished("2"):
        world.clock.now += 20
        prompt = [*prompt, 0]
        submit(world.scheduler, next(world.names), prompt, max_output=1)
        step(world.scheduler)
    assert 97 * retention.PATIENCE <= world.clock.now - begun < 97 * retention.PATIENCE + 20


def test_a_request_for_which_there_is_room_passes() -> None:
    world = World()
    world.begin()
    assert world.waits(LONG)
    submit(world.scheduler, "short", OTHER, max_output=1)
    assert step(world.scheduler) == [(3, 0, 3)]


def test_an_engine_does_not_rest_while_a_sequence_runs() -> None:
    world = World()
    world.begin()
    submit(world.scheduler, "runs", OTHER[:2], max_output=3)
    step(world.scheduler)
    submit(world.scheduler, "waits", LONG, max_output=1)
    assert step(world.scheduler) == [(2, 2, 3)]
    assert world.scheduler.idle_seconds == 0


def test_a_request_of_better_priority_takes_kept_blocks() -> None:
    world = World()
    world.begin(priority=1)
    assert world.waits(LONG, priority=1)
    submit(world.scheduler, "urgent", [8] * 8, max_output=1, priority=0)
    assert (3, 0, 8) in step(world.scheduler)


def test_a_running_sequence_takes_kept_blocks_before_another_is_preempted() -> None:
    world = World()
    world.begin()
    submit(world.scheduler, "grows", OTHER, max_output=7)
    run_to_the_end(world.scheduler)
    assert world.scheduler.count.preemptions == 0


def test_a_session_that_stays_away_for_long_is_not_kept() -> None:
    world = World(num_blocks=30, most_seconds=1000)
    prompt = SESSION
    for _ in range(retention.ENOUGH_PAUSES + 1):
        world.run(prompt)
        world.clock.now += 200
        prompt = [*prompt, 0]
    world.run(prompt)
    assert world.scheduler.block_pool.num_kept == 0


def test_a_session_is_kept_for_a_little_longer_than_its_longest_usual_pause() -> None:
    world = World(num_blocks=60, most_seconds=1000)
    prompt = SESSION
    for pause in (1, 2, 1, 2, 3, 2):
        world.run(prompt)
        world.clock.now += pause
        prompt = [*prompt, 0]
    world.run(prompt)
    assert world.waits([9] * 58)
    assert world.scheduler.idle_seconds == 3 * retention.SLACK


def test_a_retry_continues_the_session() -> None:
    world = World(num_blocks=20)
    world.run(SESSION)
    again = [*SESSION, 0, 0, 0, 0]
    submit(world.scheduler, "given up", again, max_output=1)
    step(world.scheduler)
    world.scheduler.abort("given up")
    assert world.run(again) == 1


def mean_job_time(seconds: float) -> float:
    """Four agents of ten turns each begin at once; the cache holds two of them, and computing one takes 40 seconds. A
    tool takes 5 to 60 seconds."""
    config = EngineConfig(num_blocks=300, max_num_seqs=8, prefix_retention=seconds)
    ended: list[str] = []
    engine = SimulatedEngine(config, StepCost.linear(0.04, 0.02), on_end=ended.append)
    history = [[agent] * 2000 for agent in range(4)]
    coming = [(0.0, agent, 0) for agent in range(4)]
    while coming or engine.has_unfinished_requests:
        for request in [each for each in coming if each[0] <= engine.clock]:
            coming.remove(request)
            arrival, agent, turn = request
            engine.submit(SimulatedRequest(f"{agent} {turn}", arrival, list(history[agent]), (10,)))
        if not engine.step(min(coming)[0] if coming else inf) and coming:
            engine.clock = max(engine.clock, min(coming)[0])
        for agent, turn in (map(int, each.split()) for each in ended):
            history[agent] += [100 * agent + turn] * 40
            if turn < 9:
                coming.append((engine.clock + (5, 60, 22, 40)[(agent + turn) % 4], agent, turn + 1))
            else:
                history[agent].append(round(1000 * engine.clock))
        ended.clear()
    return sum(each[-1] for each in history) / 4000


def test_agents_finish_earlier_than_by_recency_alone() -> None:
    assert mean_job_time(300) * 1.5 < mean_job_time(0)


def test_an_engine_wakes_when_kept_blocks_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens meanwhile that could wake it."""
    monkeypatch.setattr(retention, "LEAST_SECONDS", 0.0)
    llm = LLM(num_blocks=8, max_model_len=120, prefix_retention=0.5)
    params = SamplingParams(max_tokens=1, temperature=0)
    for length in (70, 80):  # a session
        llm.generate([list(range(300, 300 + length))], params)
    (output,) = llm.generate([list(range(400, 500))], params)
    assert output.outputs[0].finish_reason == "length"
