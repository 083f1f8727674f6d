"""Waiting requests: a full queue refuses more, and better priorities run first."""

import asyncio

import pytest

from inflight import QueueFullError
from tests.async_llm.helpers import GREEDY, last
from tests.coroutines import run
from tests.stepper import Stepper


def test_a_full_queue_refuses_requests_and_accepts_more_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=1, max_num_waiting=2)

    async def check() -> None:
        async with stepper.llm as llm:
            tasks = [asyncio.ensure_future(last(llm, [number + 1] * 5, GREEDY)) for number in range(5)]
            await asyncio.sleep(0)  # all have been sent
            stepper.allow(1)  # the first may run already; then the engine receives the others after its step
            refused: list[str] = []
            for task in asyncio.as_completed(tasks):
                try:
                    assert (await task).outputs[0].finish_reason == "length"
                except QueueFullError as error:
                    refused.append(str(error))
                if len(refused) == 2:
                    stepper.allow()
            assert len(refused) in (2, 3)  # the first may have begun before the others arrived
            assert all("2 sequences wait already" in message for message in refused)
            await last(llm, [1, 2], GREEDY)

    run(check())


def test_a_request_with_better_priority_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=1, policy="priority")
    order = []

    async def check() -> None:
        async with stepper.llm as llm:

            async def follow(priority: int) -> None:
                await last(llm, [priority + 10] * 5, GREEDY, priority=priority)
                order.append(priority)

            first = asyncio.ensure_future(follow(-5))
            while not stepper.engines[-1].scheduler.num_running:
                await asyncio.sleep(0.001)
            others = [asyncio.ensure_future(follow(priority)) for priority in (3, 1, 2)]
            await asyncio.sleep(0)  # all have been sent; the engine receives them together after the first step
            stepper.allow()
            await asyncio.gather(first, *others)

    run(check())
    assert order == [-5, 1, 2, 3]
