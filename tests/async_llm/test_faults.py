"""If the engine fails or is stopped, the affected callers are told, and the next call restarts it."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from inflight import AsyncLLM, EngineDeadError
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.process.connection import ProcessConnection
from tests import zoo
from tests.async_llm.helpers import ENDLESS, GREEDY, LONG, PROMPTS, idle, last
from tests.coroutines import run
from tests.stepper import Stepper


def kill_engine(llm: AsyncLLM) -> None:
    session = llm._client._session
    assert session is not None
    assert isinstance(session.connection, ProcessConnection)
    os.kill(session.connection.pid, signal.SIGKILL)


def test_if_the_engine_is_killed_every_caller_is_told_and_the_next_call_restarts_it(process_llm: AsyncLLM) -> None:
    llm = process_llm

    async def check() -> None:
        num_crashes = (await llm.stats()).num_crashes
        params = replace(LONG, max_tokens=900)  # no request can end before the engine does
        num_begun, all_run = 0, asyncio.Event()

        async def follow(number: int) -> None:
            nonlocal num_begun
            async for _ in llm.generate([number + 4, 5], params, str(number)):
                num_begun += 1
                if num_begun > 200:
                    all_run.set()

        tasks = [asyncio.ensure_future(follow(number)) for number in range(100)]
        await all_run.wait()
        kill_engine(llm)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert str(error) == "the engine was killed by SIGKILL"
        assert not llm._calls
        output, stats = await asyncio.gather(last(llm, PROMPTS[0], GREEDY), llm.stats())
        assert output.outputs[0].finish_reason == "length"
        assert stats.num_crashes == num_crashes + 1
        await idle(llm)

    run(check())


def test_an_error_in_the_forward_pass_ends_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=2)

    async def check() -> None:
        async with stepper.llm as llm:
            stepper.allow()
            run, steps = stepper.run, iter(range(10_000))

            def broken(plan: StepPlan, masks: Any) -> StepTokens:
                if next(steps) == 5:
                    raise RuntimeError("the device is on fire")
                return run(plan, masks)

            stepper.run = broken
            outputs = await asyncio.gather(*(last(llm, [number + 1] * 5, GREEDY) for number in range(5)))
            ends = [(output.outputs[0].finish_reason, output.error) for output in outputs]
            assert 1 <= ends.count(("error", "RuntimeError('the device is on fire')")) <= 2
            assert ends.count(("length", None)) >= 3
            await idle(llm)
            assert (await llm.stats()).num_crashes == 0

    run(check())


def test_an_engine_whose_loop_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch)

    async def check() -> None:
        async with stepper.llm as llm:
            stepper.allow()

            def broken() -> None:
                raise KeyError("lost")

            for _ in range(2):
                await llm.start()
                stepper.engines[-1].scheduler.plan = broken  # type: ignore[method-assign, assignment]
                with pytest.raises(EngineDeadError, match=r"the engine broke: KeyError\('lost'\)"):
                    await last(llm, [1, 2, 3], GREEDY)
            with pytest.raises(EngineDeadError, match="2 times in a row"):
                await last(llm, [1, 2, 3], GREEDY)
            await llm.stop()
            assert (await last(llm, [1, 2, 3], GREEDY)).finished

    run(check())


def test_stopping_ends_unfinished_requests_and_the_next_call_restarts_the_engine(llm: AsyncLLM) -> None:
    async def check() -> None:
        stream = llm.generate(PROMPTS[0], ENDLESS)
        await anext(stream)
        await llm.stop()
        with pytest.raises(EngineDeadError, match="was stopped"):
            async for _ in stream:
                pass
        await last(llm, PROMPTS[0], GREEDY)

    run(check())


def test_an_engine_without_references_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> Any:
        llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
        await last(llm, [1, 2, 3], GREEDY)
        return llm._client._session

    session = asyncio.run(check())
    session._thread.join(60)
    assert not session._thread.is_alive()
