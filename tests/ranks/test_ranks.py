"""Ranks as processes: refusals, and failures of steps and ranks."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError, RankLostError
from inflight.engine.engine import Engine
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.ranks import group
from inflight.engine.replicas import launch
from inflight.host.machine import Placement
from tests import zoo
from tests.coroutines import run
from tests.ranks.folders import children, folder_of
from tests.ranks.under_load import OPTIONS, messages_after, tokens

PROMPT = [7, 3, 200, 41]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of("llama", tmp_path_factory)


def engine_of(folder: str, **options: Any) -> Engine:
    return Engine(folder, EngineConfig(**{"tensor_parallel_size": 2, "num_blocks": 60, **options}))


def greedy(engine: Engine, num_tokens: int = 20) -> list[int]:
    engine.submit(engine.inputs.accept("greedy", PROMPT, SHORT))
    return [token_id for output in drained(engine) for token_id in output.new_token_ids]


def drained(engine: Engine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


def plain() -> list[int]:
    return zoo.plain_greedy(zoo.build("llama"), PROMPT, 20)


# ------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.thorough("0-Runtime")
def test_a_step_that_rank_0_gives_up_leaves_the_ranks_fit(llama: str, error: type[BaseException], layer: int) -> None:
    """It is given up before the ranks have met, and between two meetings."""
    engine = engine_of(llama, record_forward=False)

    def fail(*_: Any) -> None:
        hook.remove()
        raise error("in the middle")

    hook = engine.runner.model.model.layers[layer].register_forward_pre_hook(fail)  # type: ignore[union-attr]
    engine.submit(engine.inputs.accept("first", PROMPT, SHORT))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        token_ids = [token_id for output in drained(engine) for token_id in output.new_token_ids]
        assert token_ids == plain()
    else:
        (end,) = engine.step()
        assert end.finish_reason == "error"
    assert greedy(engine) == plain()


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.thorough
def test_a_step_fails_for_good_when_a_rank_is_gone(llama: str) -> None:
    before = children(os.getpid())
    engine = engine_of(llama)
    assert greedy(engine) == plain()
    (pid,) = set(children(os.getpid())) - set(before)
    os.kill(pid, signal.SIGKILL)
    engine.submit(engine.inputs.accept("second", PROMPT, LONG))
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
            drained(engine)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ------------------------------------------------------------------------------------------------- processes


def engine_pid(llm: AsyncLLM) -> int:
    connection = llm._client.sessions()[0].connection
    assert isinstance(connection, ProcessConnection)
    return connection.pid


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.thorough
def test_a_killed_rank_ends_its_engine_and_another_one_starts(llama: str) -> None:
    async def work() -> None:
        async with AsyncLLM(llama, **OPTIONS) as llm:
            await llm.start()
            (rank,) = children(engine_pid(llm))
            (message,) = await messages_after(lambda: os.kill(rank, signal.SIGKILL), llm, PROMPT)
            assert "rank 1 was killed by SIGKILL" in message
            assert await tokens(llm, PROMPT, 20) == plain()
            assert llm.num_crashes == 1

    run(work())


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.thorough
def test_a_rank_that_is_killed_while_nothing_runs_costs_no_request(llama: str) -> None:
    async def work() -> None:
        async with AsyncLLM(llama, **OPTIONS) as llm:
            assert await tokens(llm, PROMPT, 20) == plain()
            (rank,) = children(engine_pid(llm))
            os.kill(rank, signal.SIGKILL)
            while llm.num_crashes == 0:
                await asyncio.sleep(0.01)
            assert await tokens(llm, PROMPT, 20) == plain()

    run(work())


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.thorough
def test_ranks_end_with_the_first_however_it_ends(llama: str) -> None:
    async def work() -> None:
        async with AsyncLLM(llama, **OPTIONS) as llm:
            await llm.start()
            first, (rank,) = engine_pid(llm), children(engine_pid(llm))
            await messages_after(lambda: os.kill(first, signal.SIGKILL), llm, PROMPT)
            await gone(rank)
            assert await tokens(llm, PROMPT, 20) == plain()
            (rank,) = children(engine_pid(llm))
        await gone(rank)

    async def gone(pid: int) -> None:
        while b"inflight.engine.ranks" in command_of(pid):
            await asyncio.sleep(0.01)

    run(work())


def test_llm_runs_ranks_in_processes_of_their_own(llama: str) -> None:
    cpus = os.sched_getaffinity(0)
    llm = LLM(llama, tensor_parallel_size=2, num_blocks=60)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SHORT, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == plain()
    assert llm.model_info.threads.startswith("2 ranks of ")
    assert os.sched_getaffinity(0) == cpus


def test_a_rank_that_cannot_load_is_told_of(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = group.started
    monkeypatch.setattr(group, "started", lambda module, files: started("tests.ranks.broken_rank", files))
    with pytest.raises(ModelError, match=r"all ranks: rank 1 ended with exit code 1: no luck"):
        engine_of(llama)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gpt2", 2, "no tp_plan for the layers of GPT2LMHeadModel"),
        ("llama", 3, "tensor_parallel_size is 3, but the model has 4 attention heads"),
        ("deepseek_v3", 5, "tensor_parallel_size is 5, but .* cannot be divided"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    name: str, size: int, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ModelError, match=message):
        engine_of(folder_of(name, tmp_path_factory), tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"draft_model": "gpt2"}, "draft_model is not supported with a tensor_parallel_size"),
        ({"prefix_cache_dir": "blocks"}, "prefix_cache_dir is not supported with a tensor_parallel_size"),
        ({"executor": "rows"}, "executor other than packed is not supported with a tensor_parallel_size"),
        ({"device": "cuda"}, "a GPU is not supported with a tensor_parallel_size"),
    ],
)
def test_options_that_ranks_do_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"tensor_parallel_size": 2, **options})


def test_a_loaded_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel_size=1"):
        LLM(zoo.build("llama"), tensor_parallel_size=2)
    with pytest.raises(ModelError, match="give its hub id or folder"):
        Engine(zoo.build("llama"), EngineConfig(tensor_parallel_size=2))


# ------------------------------------------------------------------------------------------------- weights and places


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.thorough
def test_rounded_weights_are_divided_as_they_are(quantization: str, tmp_path: Path) -> None:
    model = zoo.draw("llama", 8, 0)
    config = type(model.config)(
        **model.config.to_dict() | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    )
    torch.manual_seed(0)
    type(model)(config).save_pretrained(tmp_path)
    engine = engine_of(str(tmp_path), quantization=quantization)
    assert engine.model_info.weights[0].kind == quantization
    assert engine.model_info.notes == ()
    assert len(greedy(engine)) == 20


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.thorough
def test_a_vocabulary_that_ranks_cannot_divide_has_zeros_at_its_end(is_tied: bool, tmp_path: Path) -> None:
    model = zoo.draw("llama", 8, 0)
    config = type(model.config)(**model.config.to_dict() | {"vocab_size": 257, "tie_word_embeddings": is_tied})
    torch.manual_seed(0)
    odd = type(model)(config).eval()
    odd.save_pretrained(tmp_path)
    engine = engine_of(str(tmp_path))
    assert greedy(engine) == zoo.plain_greedy(odd, PROMPT, 20)
    assert engine.model_info.is_recorded
    assert engine.model_info.vocab_size == 257


def test_ranks_of_a_replica_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Placement(node, (2 * node, 2 * node + 1), 2) for node in range(4)]
    monkeypatch.setattr(launch, "place", lambda number: parts[:number])
    assert launch._places(2, 2) == [Placement(0, (0, 1, 2, 3), 2), Placement(2, (4, 5, 6, 7), 2)]
    assert launch._places(4, 1) == parts
