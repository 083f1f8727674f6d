"""A request that ends early in any way leaves nothing behind."""

import asyncio
import random
from contextlib import aclosing

import pytest

from inflight import AsyncLLM, SamplingParams
from tests import zoo
from tests.async_llm.helpers import ENDLESS, GREEDY, LONG, PROMPTS, idle, last
from tests.coroutines import run
from tests.stepper import Stepper


def test_leaving_the_async_for_loop_aborts_the_request(llm: AsyncLLM) -> None:
    async def check() -> None:
        async for _ in llm.generate(PROMPTS[0], ENDLESS):
            break
        await idle(llm)
        async with aclosing(llm.stream(PROMPTS[0], ENDLESS)) as deltas:
            await anext(deltas)
        await idle(llm)

    run(check())


def test_cancelling_the_task_aborts_the_request(llm: AsyncLLM) -> None:
    async def check() -> None:
        has_begun = asyncio.Event()

        async def follow() -> None:
            async for _ in llm.generate(PROMPTS[0], ENDLESS):
                has_begun.set()

        task = asyncio.ensure_future(follow())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)

    run(check())


def test_an_aborted_request_is_told_once(llm: AsyncLLM) -> None:
    async def check() -> None:
        seen = []
        async for output in llm.generate(PROMPTS[0], ENDLESS, "mine"):
            seen.append(output)
            await llm.abort("mine")
            await llm.abort("unknown")
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        assert {completion.finish_reason for completion in seen[-1].outputs} == {"abort"}
        await idle(llm)

    run(check())


def test_a_request_can_be_aborted_while_the_engine_starts() -> None:
    async def check() -> None:
        llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
        task = asyncio.ensure_future(last(llm, [1, 2, 3], LONG, "mine"))
        await asyncio.sleep(0)
        await llm.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        await llm.stop()

    run(check())


@pytest.mark.thorough("thread")
def test_a_thousand_streams_left_at_random_points_leave_nothing_behind(llm: AsyncLLM) -> None:
    chance = random.Random(0)

    async def follow(number: int, num_updates: int) -> str:
        seen = 0
        async for output in llm.generate(
            [number % 200 + 4, 5, 6], SamplingParams(max_tokens=24, seed=number), str(number)
        ):
            seen += 1
            if output.finished:
                return str(output.outputs[0].finish_reason)
            if seen == num_updates:
                if number % 3 == 0:
                    return "left"
                if number % 3 == 1:
                    await llm.abort(str(number))
                else:
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
        raise AssertionError("a stream ended without saying why")

    async def check() -> None:
        tasks = [asyncio.ensure_future(follow(number, chance.randrange(30))) for number in range(1000)]
        for task in chance.sample(tasks, 100):  # before the requests have begun
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {end if isinstance(end, str) else type(end) for end in ends}
        assert kinds == {"left", "abort", "length", "stop", asyncio.CancelledError}
        await idle(llm)
        assert await last(llm, PROMPTS[0], GREEDY)

    run(check())


def test_a_request_is_aborted_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=1)

    async def check() -> None:
        async with stepper.llm as llm:
            stepper.allow()
            output = await last(llm, [1, 2, 3], LONG, timeout=1e-6)
            assert output.outputs[0].finish_reason == "abort"
            assert output.error == "the request's deadline has passed"
            with pytest.raises(ValueError, match="timeout is 0"):
                await last(llm, [1, 2, 3], GREEDY, timeout=0)
            assert (await last(llm, [1, 2, 3], GREEDY, timeout=1e6)).outputs[0].finish_reason == "length"

    run(check())
