"""The embedded model in two processes: outputs, deaths, new weights, and what a server says of them."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, AsyncLLM, EngineDeadError, InvalidRequestError, SamplingParams
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.step.record import RecordTo
from inflight.demo_model import DEMO_MODEL
from inflight.engine.process.connection import ProcessConnection
from inflight.host.machine import place
from tests import zoo
from tests.coroutines import run

PROMPTS = [f"Once upon a time, number {number}" for number in range(12)]
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


async def all_loaded(llm: AsyncLLM) -> None:
    while len(llm._client.sessions()) < llm.num_replicas:
        await llm.start()
        await asyncio.sleep(0.01)


def pid_of(llm: AsyncLLM, number: int) -> int:
    connection = llm._client.sessions()[number].connection
    assert isinstance(connection, ProcessConnection)
    return connection.pid


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(replicas=2, num_blocks=600, restart_delays=(0.0, 0.0), seed=5)
    yield llm
    asyncio.run(llm.stop())


def test_outputs_are_those_of_one_engine_seeds_included(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, n=2)

    expected = LLM(seed=5).generate(PROMPTS, params, use_tqdm=False)

    async def check() -> None:
        await all_loaded(llm)
        outputs = await asyncio.gather(*(last(llm, prompt, params) for prompt in PROMPTS))
        stats = await llm.replica_stats()
        assert [each is not None and each.num_requests > 0 for each in stats.values()] == [True, True]
        total = await llm.stats()
        assert total.num_requests == len(PROMPTS)
        assert sum(total.num_steps_by_size) == total.num_steps
        assert list(map(tokens, outputs)) == list(map(tokens, expected))

    run(check())


def test_each_engine_runs_on_its_own_cores(llm: AsyncLLM) -> None:
    async def check() -> None:
        await all_loaded(llm)
        cpus = [os.sched_getaffinity(pid_of(llm, number)) for number in range(2)]
        everything = os.sched_getaffinity(0)
        assert set().union(*cpus) <= everything
        assert len(everything) < 2 or not cpus[0] & cpus[1]

    run(check())


def weights_of(pid: int) -> set[str]:
    """The inodes of the files in memory in which a process has its weights."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:inflight: weights" in line}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_engines_of_one_node_have_one_copy_of_the_weights(llm: AsyncLLM) -> None:
    async def check() -> None:
        await all_loaded(llm)
        first, second = (weights_of(pid_of(llm, number)) for number in range(2))
        if len({place.node for place in place(2)}) == 1:
            assert first == second
            assert len(first) == 1
        else:
            assert not first | second

    run(check())


def test_each_engine_can_be_watched_by_its_number(llm: AsyncLLM, tmp_path: Path) -> None:
    async def check() -> None:
        await all_loaded(llm)
        steps, states = [0, 0], llm.watch(0.01, RecordTo(path=str(tmp_path / "steps.jsonl")))

        async def ask() -> None:
            while not all(steps):
                await asyncio.gather(*(last(llm, prompt, SHORT) for prompt in PROMPTS))

        asking = asyncio.create_task(ask())
        async for live_states in states:
            for number, state in live_states.items():
                steps[number] += state.num_steps
                assert all(each.request_id.startswith("request-") for each in (*state.running, *state.waiting))
            if asking.done():
                break
        await states.aclose()
        await asking

    run(check())
    assert {path.name for path in tmp_path.iterdir()} == {"steps-0.jsonl", "steps-1.jsonl"}


def test_if_one_is_killed_its_requests_fail_and_all_others_are_served(llm: AsyncLLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, n=8)  # no stall lasts as long

    async def check() -> None:
        await all_loaded(llm)
        num_crashes = llm.num_crashes
        num_updates = dict.fromkeys(PROMPTS, 0)

        async def follow(prompt: str) -> None:
            async for _ in llm.generate(prompt, endless):
                num_updates[prompt] += 1

        async def all_updated() -> None:
            """Wait until each has got something more, or has ended."""
            before = dict(num_updates)
            while any(not task.done() and num_updates[prompt] == before[prompt] for prompt, task in tasks.items()):
                await asyncio.sleep(0.01)

        tasks = {prompt: asyncio.ensure_future(follow(prompt)) for prompt in PROMPTS}
        await all_updated()
        os.kill(pid_of(llm, 0), signal.SIGKILL)
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        await all_updated()
        failed = {prompt for prompt, task in tasks.items() if task.done()}
        for prompt in failed:
            assert (type(error := tasks[prompt].exception()), str(error)) == (
                EngineDeadError,
                "replica 0 was killed by SIGKILL",
            )
        assert 0 < len(failed) < len(PROMPTS)
        for _ in range(4):  # whether the dead one has been started again or not
            assert len((await last(llm, PROMPTS[0], SHORT)).outputs[0].token_ids) == 20
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await all_loaded(llm)
        assert llm.num_crashes == num_crashes + 1
        assert not llm._calls

    run(check())


@pytest.mark.thorough
def test_new_weights_are_loaded_without_refusing_a_request(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    params = SamplingParams(temperature=0, max_tokens=30)
    before = tokens(LLM(str(model)).generate("Once upon a time", params, use_tqdm=False)[0])

    async def check() -> None:
        llm = AsyncLLM(str(model), replicas=2, num_blocks=600)
        await all_loaded(llm)
        inodes = weights_of(pid_of(llm, 0))
        pids = {pid_of(llm, number) for number in range(2)}
        is_reloading, seen = True, []

        async def ask_for_ever() -> None:
            while is_reloading:
                seen.append(tokens(await last(llm, "Once upon a time", params)))

        asking = [asyncio.ensure_future(ask_for_ever()) for _ in range(4)]
        weights = load_file(model / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        changed = {
            name: each + 0.05 * torch.randn(each.shape, generator=generator).to(each.dtype) if each.dim() == 2 else each
            for name, each in weights.items()
        }
        save_file(changed, model / "new.safetensors", {"format": "pt"})
        os.replace(model / "new.safetensors", model / "model.safetensors")
        await llm.reload_weights()
        is_reloading = False
        await asyncio.gather(*asking)
        after = tokens(LLM(str(model)).generate("Once upon a time", params, use_tqdm=False)[0])
        assert after != before
        assert {json.dumps(each) for each in seen} <= {json.dumps(before), json.dumps(after)}
        assert json.dumps(before) in {json.dumps(each) for each in seen}
        for _ in range(4):
            assert tokens(await last(llm, "Once upon a time", params)) == after
        assert not pids & {pid_of(llm, number) for number in range(2)}
        assert not inodes & weights_of(pid_of(llm, 0))
        assert llm.num_crashes == 0
        await llm.stop()

    run(check())


def test_a_loaded_model_is_reloaded_as_it_is_now() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)  # its own: all tests share those that are built

    async def check() -> None:
        async with AsyncLLM(model, in_process=True) as llm:

            async def ask() -> list[int]:
                outputs = [output async for output in llm.generate([5, 6, 7], params)]
                return outputs[-1].outputs[0].token_ids

            before = await ask()
            with torch.no_grad():
                model.get_output_embeddings().weight.neg_()
            with pytest.raises(InvalidRequestError, match="weights have changed"):
                await ask()
            await llm.reload_weights()
            after = await ask()
        assert after == LLM(model).generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids != before

    run(check())


def test_options_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is only this process"):
        AsyncLLM(in_process=True, replicas=2)
    monkeypatch.setattr("inflight.engine.replicas.launch.best_number", lambda system: 2)
    with pytest.raises(ValueError, match="replicas is 'auto', but with in_process=True there is only this process"):
        AsyncLLM(in_process=True, replicas="auto")
    with pytest.raises(ValueError, match="did you mean 'replicas'"):
        AsyncLLM(replica=2)
    with pytest.raises(ValueError, match="routing is 'nearest'"):
        AsyncLLM(routing="nearest")
    with pytest.raises(ValueError, match="replicas is 0"):
        AsyncLLM(replicas=0)
