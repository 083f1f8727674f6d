"""Ranks that join over a network: this machine's loopback."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.engine.engine import Engine
from inflight.engine.ranks.remote_ranks import KEY_VARIABLE
from tests import zoo
from tests.coroutines import run
from tests.ranks.folders import folder_of
from tests.ranks.test_exactness import run as run_all
from tests.ranks.under_load import OPTIONS, messages_after, tokens

PROMPT = [7, 3, 200, 41]
NUMBERS = count()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")
    pid = os.getpid()  # loopback has addresses enough, and ports below 30,000 are given to nobody who does not ask
    return f"127.77.{pid // 256 % 256}.{pid % 256}:{20_000 + next(NUMBERS)}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of("llama", tmp_path_factory)


def plain() -> list[int]:
    return zoo.plain_greedy(zoo.build("llama"), PROMPT, 20)


@contextmanager
def rank_at(address: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "inflight", "rank", address]
    with subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.thorough
def test_ranks_on_a_network_give_the_bits_of_ranks_on_a_machine(llama: str, address: str) -> None:
    options = {"tensor_parallel_size": 2, "num_blocks": 60, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=0)
    requests = {str(number): ([5 + number, *PROMPT * (number + 1)], params) for number in range(3)}
    here = run_all(Engine(llama, EngineConfig(**options)), requests)  # type: ignore[arg-type]
    with rank_at(address):
        engine = Engine(llama, EngineConfig(rank_address=address, **options))  # type: ignore[arg-type]
        assert engine.model_info.is_recorded
        assert run_all(engine, requests) == here


@pytest.mark.thorough
def test_a_rank_joins_again_and_when_it_leaves_the_next_engine_waits_for_another_one(llama: str, address: str) -> None:
    async def work() -> None:
        with rank_at(address) as rank:
            async with AsyncLLM(llama, rank_address=address, **OPTIONS) as llm:
                assert await tokens(llm, PROMPT, 20) == plain()
            async with AsyncLLM(llama, rank_address=address, **OPTIONS) as llm:
                assert await tokens(llm, PROMPT, 20) == plain()
                with pytest.raises(ModelError, match="the weights cannot be reloaded"):
                    await llm.reload_weights()
                (message,) = await messages_after(rank.kill, llm, PROMPT)
                assert re.search(r"rank 1 on 127\.[0-9.]* has left", message)
                with rank_at(address):
                    assert await tokens(llm, PROMPT, 20) == plain()

    run(work())


@pytest.mark.thorough
def test_who_has_another_key_is_refused(llama: str, address: str) -> None:
    config = EngineConfig(tensor_parallel_size=2, rank_address=address, num_blocks=60)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(Engine, llama, config)
        with rank_at(address, **{KEY_VARIABLE: "a guess"}) as wrong:
            assert wrong.stderr is not None
            assert f"has another key in {KEY_VARIABLE}" in wrong.stderr.read()
            assert wrong.wait() == 2
        with rank_at(address):
            assert loading.result().model_info.num_ranks == 2


@pytest.mark.parametrize("address", ["here", "127.0.0.1:0", "127.0.0.1:99999", ":80"])
def test_what_is_no_address_is_refused(address: str, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")
    with pytest.raises(ModelError, match="it must be HOST:PORT"):
        Engine(llama, EngineConfig(tensor_parallel_size=2, rank_address=address))


@pytest.mark.thorough
def test_without_a_key_nobody_joins(llama: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ModelError, match=f"need a key in {KEY_VARIABLE}"):
        Engine(llama, EngineConfig(tensor_parallel_size=2, rank_address=address))
    with rank_at(address) as rank:
        assert rank.stderr is not None
        assert f"need a key in {KEY_VARIABLE}" in rank.stderr.read()
        assert rank.wait() == 2


def test_an_address_is_for_the_ranks_of_one_engine(llama: str, address: str) -> None:
    for front in (AsyncLLM, LLM):
        with pytest.raises(ValueError, match="there are 2 replicas, but ranks join only one"):
            front(llama, replicas=2, tensor_parallel_size=2, rank_address=address)
    with pytest.raises(ValueError, match="there is a rank_address, but tensor_parallel_size is 1"):
        EngineConfig(rank_address=address)
