"""The front for those who serve: streams, how they end early, and who hears of what."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, AsyncLLM, EngineDeadError, InvalidRequestError, ModelError, QueueFullError, SamplingParams
from inflight.engine_process.connection import ProcessConnection
from inflight.outputs import RequestOutput
from inflight.plan import StepPlan, StepTokens
from tests import zoo
from tests.stepper import Stepper
from tests.text.tokenizers_for_tests import byte_level

PROMPTS = ["Once upon a time", "In a quiet village", "The fox", [5, 6, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, but not for ever."""

    async def limited() -> None:
        async with asyncio.timeout(240):
            await work

    asyncio.run(limited())


async def last(llm: AsyncLLM, *args: Any, **options: Any) -> RequestOutput:
    """The whole of a request's output."""
    outputs = [output async for output in llm.generate(*args, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def idle(llm: AsyncLLM) -> None:
    """Return once nothing runs or waits any more, and see that nothing was kept."""
    while True:
        stats = await llm.stats()
        if not stats.num_running and not stats.num_waiting:
            break
    assert stats.num_blocks_used == 0
    assert not llm._calls
    assert not (await llm._session())._mailboxes


@pytest.fixture(scope="module")
def process_llm() -> Iterator[AsyncLLM]:
    """The embedded model in a process of its own."""
    llm = AsyncLLM(restart_delays=(0.0, 0.0), num_blocks=2000)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture(scope="module", params=["process", "thread"])
def llm(request: pytest.FixtureRequest, process_llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """The embedded model, once in a process and once in a thread."""
    if request.param == "process":
        yield process_llm
        return
    llm = AsyncLLM(in_process=True, num_blocks=2000)
    yield llm
    asyncio.run(llm.stop())


# ------------------------------------------------------------------------------------------------------ what comes


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=7, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=40, stop=["a", "the"]),
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(300, 301), truncate_prompt_tokens=2),
        None,
    ],
)
def test_outputs_are_those_of_the_offline_front(llm: AsyncLLM, offline: LLM, params: SamplingParams | None) -> None:
    if params is None:
        run(llm.start())
        assert llm.get_default_sampling_params() == offline.get_default_sampling_params()
        params = SamplingParams(seed=3, max_tokens=5)

    async def check() -> None:
        return await asyncio.gather(*(last(llm, prompt, params) for prompt in PROMPTS))  # type: ignore[return-value]

    outputs: Any = asyncio.run(check())
    for output, expected in zip(outputs, offline.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert output.outputs == expected.outputs
        assert (output.prompt, output.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
        metrics = output.metrics
        assert metrics.arrival_time < metrics.first_scheduled_time < metrics.first_token_time
        assert metrics.first_token_time <= metrics.finished_time  # a reader that comes late gets all at once


def test_an_output_grows_and_what_was_given_out_stays_as_it_was(llm: AsyncLLM) -> None:
    async def check() -> None:
        seen = [output async for output in llm.generate(PROMPTS[0], GREEDY, "mine")]
        assert {output.request_id for output in seen} == {"mine"}
        texts = [output.outputs[0].text for output in seen]
        tokens = [output.outputs[0].token_ids for output in seen]
        for shorter, longer in pairwise(seen):
            assert longer.outputs[0].text.startswith(shorter.outputs[0].text)
            assert longer.outputs[0].token_ids[: len(shorter.outputs[0].token_ids)] == shorter.outputs[0].token_ids
        assert len(tokens[-1]) == 12
        deltas = [delta async for delta in llm.stream(PROMPTS[0], GREEDY)]
        assert "".join(map(str, deltas)) == texts[-1]
        assert [token for delta in deltas for token in delta.token_ids] == tokens[-1]
        assert deltas[-1].finish_reason == "length"
        assert deltas[-1].output is not None
        assert deltas[-1].output.outputs == seen[-1].outputs
        assert all(delta.output is None for delta in deltas[:-1])

    run(check())


def test_a_chat_goes_through_the_template(llm: AsyncLLM, offline: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]

    async def check() -> None:
        outputs = [output async for output in llm.chat(messages, GREEDY)]
        (expected,) = offline.chat(messages, GREEDY, use_tqdm=False)
        assert outputs[-1].outputs == expected.outputs
        with pytest.raises(ValueError, match=r"AsyncLLM\.chat has no option 'template'"):
            llm.chat(messages, GREEDY, template="")

    run(check())


def test_the_model_is_known_once_it_is_loaded() -> None:
    llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = llm.model_info

    async def check() -> None:
        async with llm:
            assert llm.model_info.model_class == "GPT2LMHeadModel"
            assert llm.get_default_sampling_params() == SamplingParams()
            await llm.check_health()
            assert llm.tokenizer is None

    run(check())


def test_stats_count_requests_tokens_and_what_the_cache_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with AsyncLLM(zoo.build("gpt2"), in_process=True, block_size=4, num_blocks=50) as llm:
            for _ in range(2):
                await last(llm, [3] * 17, SamplingParams(temperature=0, max_tokens=5))
            stats = await llm.stats()
            assert (stats.num_requests, stats.num_prompt_tokens, stats.num_generated_tokens) == (2, 34, 10)
            assert stats.num_cached_tokens == 16
            assert stats.cache_hit_rate == 16 / 34
            assert stats.num_steps == 10
            assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
            assert stats.num_blocks_used == 0
            assert stats.num_blocks_cached > 0
            assert stats.num_blocks_cached + stats.num_blocks_free == 50

    run(check())


# ------------------------------------------------------------------------------------------------------ ending early


def test_leaving_the_loop_aborts_the_request(llm: AsyncLLM) -> None:
    async def check() -> None:
        async for _ in llm.generate(PROMPTS[0], LONG):
            break
        await idle(llm)
        async with aclosing(llm.stream(PROMPTS[0], LONG)) as deltas:
            await anext(deltas)
        await idle(llm)

    run(check())


def test_cancelling_the_task_aborts_the_request(llm: AsyncLLM) -> None:
    async def check() -> None:
        has_begun = asyncio.Event()

        async def follow() -> None:
            async for _ in llm.generate(PROMPTS[0], LONG):
                has_begun.set()

        task = asyncio.ensure_future(follow())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)

    run(check())


def test_an_aborted_request_hears_of_it_once(llm: AsyncLLM) -> None:
    async def check() -> None:
        seen = []
        async for output in llm.generate(PROMPTS[0], LONG, "mine"):
            seen.append(output)
            await llm.abort("mine")
            await llm.abort("unknown")
        assert [output.outputs[0].finish_reason for output in seen if output.finished] == ["abort"]
        assert seen[-1].finished
        await idle(llm)

    run(check())


def test_a_request_may_be_aborted_while_the_engine_starts() -> None:
    async def check() -> None:
        llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
        task = asyncio.ensure_future(last(llm, [1, 2, 3], LONG, "mine"))
        await asyncio.sleep(0)
        await llm.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        await llm.stop()

    run(check())


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
        for task in chance.sample(tasks, 100):  # before they have begun
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {end if isinstance(end, str) else type(end) for end in ends}
        assert kinds == {"left", "abort", "length", "stop", asyncio.CancelledError}
        await idle(llm)
        assert await last(llm, PROMPTS[0], GREEDY)

    run(check())


def test_a_request_whose_time_is_up_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "the prompt is empty"),
        ([1, 2.5], {}, "the prompt contains 2.5"),
        ([10**9], {}, "the prompt contains token id 1000000000"),
        ({"text": "a"}, {}, "a prompt given as a dict"),
        ([1], {"sampling_params": {"n": 2}}, "it must be SamplingParams"),
        ([1], {"priority": "high"}, "priority is 'high'"),
        ([1], {"cache_salt": 3}, "cache_salt is 3"),
    ],
)
def test_a_bad_request_is_refused_in_a_sentence(
    process_llm: AsyncLLM, prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    async def check() -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(sentence)):
            await last(process_llm, prompt, **({"sampling_params": GREEDY} | options))
        await idle(process_llm)

    run(check())


def test_what_only_the_engine_can_refuse_is_raised_here() -> None:
    async def check() -> None:
        async with AsyncLLM(zoo.build("gpt2"), in_process=True) as llm:
            with pytest.raises(InvalidRequestError, match="no tokenizer to find text with"):
                await last(llm, [1, 2, 3], SamplingParams(stop="x"))
            await idle(llm)

    run(check())


def test_a_request_id_in_use_is_refused(llm: AsyncLLM) -> None:
    async def check() -> None:
        async for _ in llm.generate(PROMPTS[0], LONG, "mine"):
            with pytest.raises(InvalidRequestError, match="'mine' is in use"):
                await last(llm, PROMPTS[1], GREEDY, "mine")
            break
        await idle(llm)
        await last(llm, PROMPTS[0], GREEDY, "mine")

    run(check())


def test_a_full_queue_refuses_and_takes_more_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=1, max_num_waiting=2)

    async def check() -> None:
        async with stepper.llm as llm:
            tasks = [asyncio.ensure_future(last(llm, [number + 1] * 5, GREEDY)) for number in range(5)]
            refused: list[str] = []
            for task in asyncio.as_completed(tasks):
                try:
                    assert (await task).outputs[0].finish_reason == "length"
                except QueueFullError as error:
                    refused.append(str(error))
                if len(refused) == 2:
                    stepper.allow()
            assert len(refused) in (2, 3)  # the first may have begun to run before the others came
            assert all("2 sequences wait already" in message for message in refused)
            await last(llm, [1, 2], GREEDY)

    run(check())


def test_a_better_request_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(monkeypatch, max_num_seqs=1, policy="priority")
    order = []

    async def check() -> None:
        async with stepper.llm as llm:

            async def follow(priority: int) -> None:
                await last(llm, [priority + 10] * 5, GREEDY, priority=priority)
                order.append(priority)

            stepper.allow(1)
            first = asyncio.ensure_future(follow(-5))
            while not (await llm.stats()).num_running:
                pass
            others = [asyncio.ensure_future(follow(priority)) for priority in (3, 1, 2)]
            stepper.allow(1)
            while (await llm.stats()).num_waiting < 3:
                stepper.allow(1)
            stepper.allow()
            await asyncio.gather(first, *others)

    run(check())
    assert order == [-5, 1, 2, 3]


def test_what_can_not_be_told_to_another_process_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model is a loaded GPT2LMHeadModel, .* or in_process=True"):
        AsyncLLM(zoo.build("gpt2"))
    with pytest.raises(ModelError, match=r"the tokenizer is a loaded .*, .* or in_process=True"):
        AsyncLLM(None, byte_level().inner)
    with pytest.raises(ModelError, match="the model is a int"):
        AsyncLLM(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="there is no model folder"):
        AsyncLLM("./nowhere")
    with pytest.raises(ValueError, match="AsyncLLM has no option 'max_seqs'; did you mean 'max_num_seqs'"):
        AsyncLLM(max_seqs=3)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_model_that_can_not_be_loaded_is_refused_each_time(in_process: bool) -> None:
    async def check() -> None:
        llm = AsyncLLM(in_process=in_process, max_model_len=10**6)
        for _ in range(2):
            with pytest.raises(ModelError, match="max_model_len is 1000000; this model accepts at most"):
                await last(llm, PROMPTS[0])

    run(check())


# ------------------------------------------------------------------------------------------------------ faults


def kill_engine(llm: AsyncLLM) -> None:
    session = llm._supervisor._session
    assert session is not None
    assert isinstance(session._connection, ProcessConnection)
    os.kill(session._connection.pid, signal.SIGKILL)


def test_when_the_engine_is_killed_every_caller_hears_and_the_next_call_starts_it_anew(process_llm: AsyncLLM) -> None:
    llm = process_llm

    async def check() -> None:
        num_crashes = (await llm.stats()).num_crashes
        num_begun, all_run = 0, asyncio.Event()

        async def follow(number: int) -> None:
            nonlocal num_begun
            async for _ in llm.generate([number + 4, 5], LONG, str(number)):
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


def test_an_error_in_the_forward_pass_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_engine_whose_loop_breaks_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_stopping_ends_what_is_unfinished_and_the_next_call_starts_anew(llm: AsyncLLM) -> None:
    async def check() -> None:
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        await llm.stop()
        with pytest.raises(EngineDeadError, match="was stopped"):
            async for _ in stream:
                pass
        await last(llm, PROMPTS[0], GREEDY)

    run(check())


def test_an_engine_that_nobody_holds_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> Any:
        llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
        await last(llm, [1, 2, 3], GREEDY)
        return llm._supervisor._session

    session = asyncio.run(check())
    session._thread.join(60)
    assert not session._thread.is_alive()


# ------------------------------------------------------------------------------------------------------ readers


def test_a_slow_reader_gets_more_at_once_and_holds_up_nobody(llm: AsyncLLM) -> None:
    async def check() -> None:
        slow = llm.generate(PROMPTS[0], LONG)
        await anext(slow)
        fast = await last(llm, PROMPTS[0], LONG)
        while (await llm.stats()).num_running:
            pass
        rest = [output async for output in slow]
        assert len(rest) == 1
        assert rest[0].outputs == fast.outputs

    run(check())


def test_one_llm_serves_several_event_loops_at_once_and_one_after_another(llm: AsyncLLM) -> None:
    results: list[RequestOutput] = []

    def serve() -> None:
        results.append(asyncio.run(last(llm, PROMPTS[0], GREEDY)))

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serve()
    assert len(results) == 4
    assert all(result.outputs == results[0].outputs for result in results)


SCRIPT = """
import asyncio
from inflight import AsyncLLM, SamplingParams

print("once")
llm = AsyncLLM()

async def answer():
    async for output in llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5)):
        pass
    return output.outputs[0].text

print([asyncio.run(answer()) for _ in range(2)])
"""


def test_it_works_from_a_plain_script(tmp_path: Path, offline: LLM) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    (expected,) = offline.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert done.stdout == f"once\n{[expected.outputs[0].text] * 2}\n"
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
