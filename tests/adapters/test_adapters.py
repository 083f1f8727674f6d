"""Adapters of an engine: by name, loaded and forgotten while it runs, bounded in memory, apart in the prefix cache."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from inflight import LLM, AdapterError, AsyncLLM, EngineDeadError, InvalidRequestError, ModelError, SamplingParams
from inflight.contracts.api.outputs import RequestOutput
from tests import others, zoo
from tests.adapters.made import modules_of, write_adapter
from tests.adapters.test_batches import scored
from tests.async_llm.helpers import last
from tests.async_llm.test_faults import kill_engine
from tests.coroutines import run

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
PROMPT = [(7 * place) % 250 for place in range(50)]
BLOCK = 16
MOST = len(PROMPT) // BLOCK * BLOCK
"""The most tokens of the prompt that can be cached."""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {
        name: write_adapter(tmp_path / name, _modules(zoo.build("llama")), seed) for seed, name in enumerate("abcd")
    }


def _modules(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    return modules_of(model, "q_proj", "v_proj", "down_proj")


@pytest.fixture
def expected(folders: dict[str, str]) -> dict[str | None, Any]:
    """What each adapter gives for the prompt."""
    llm = LLM(zoo.build("llama"), adapters=folders, enable_prefix_caching=False)
    outputs = {adapter: scored(generated(llm, adapter)) for adapter in (None, *folders)}
    assert len({str(each) for each in outputs.values()}) == 5
    return outputs


def generated(llm: LLM, adapter: str | None) -> RequestOutput:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, adapter=adapter)
    return output


def num_cached(output: RequestOutput) -> int:
    return output.metrics.num_cached_tokens


def test_each_adapter_has_prefixes_of_its_own(folders: dict[str, str], expected: dict[str | None, Any]) -> None:
    llm = LLM(zoo.build("llama"), adapters={**folders, "a again": folders["a"]}, block_size=BLOCK)
    for hit in (0, MOST):
        for adapter in (None, *folders):
            output = generated(llm, adapter)
            assert num_cached(output) == hit
            assert scored(output) == expected[adapter]
    assert num_cached(generated(llm, "a again")) == MOST  # another name of the same


def test_prefixes_on_disk_are_found_by_contents_not_by_name(
    folders: dict[str, str], expected: dict[str | None, Any], tmp_path: Path
) -> None:
    def engine(**adapters: str) -> LLM:
        return LLM(zoo.build("llama"), adapters=adapters, prefix_cache_dir=tmp_path / "blocks", block_size=BLOCK)

    first = engine(x=folders["a"])
    generated(first, "x")
    first.cache_prefix(PROMPT, adapter="x")
    moved = tmp_path / "moved"
    shutil.copytree(folders["a"], moved)
    second = engine(x=folders["b"], y=str(moved))
    for adapter, name in ((None, None), ("x", "b"), ("y", "a")):
        assert scored(generated(second, adapter)) == expected[name]
    assert second.engine.stats().num_restored_tokens == MOST  # those of "y" alone


def test_adapters_come_and_go(folders: dict[str, str], expected: dict[str | None, Any]) -> None:
    llm = LLM(zoo.build("llama"), adapters={})
    with pytest.raises(AdapterError, match="there is no adapter 'a'; there are none"):
        generated(llm, "a")
    llm.load_adapter("a", folders["a"])
    llm.load_adapter("b", Path(folders["b"]))
    assert dict(llm.adapters) == {"a": folders["a"], "b": folders["b"]}
    with pytest.raises(AdapterError, match=r"there is an adapter 'a' already, .*; unload it first"):
        llm.load_adapter("a", folders["b"])
    assert scored(generated(llm, "a")) == expected["a"]
    stream = llm.stream([PROMPT], PARAMS, adapter="b")
    tokens = list(next(stream).token_ids)
    llm.unload_adapter("b")  # what runs goes on
    write_adapter(Path(folders["b"]), _modules(zoo.build("llama")), seed=9)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == expected["b"][0][0]
    with pytest.raises(AdapterError, match="there is no adapter 'b'; there are 'a'"):
        generated(llm, "b")
    llm.load_adapter("b", folders["b"])  # the same folder with other contents is another adapter
    output = generated(llm, "b")
    assert num_cached(output) == 0
    assert scored(output) != expected["b"]
    with pytest.raises(AdapterError, match="there is no adapter 'c'"):
        llm.unload_adapter("c")


def test_memory_is_bounded_and_what_was_given_up_comes_back(
    folders: dict[str, str], expected: dict[str | None, Any]
) -> None:
    llm = LLM(zoo.build("llama"), adapters=folders, adapter_memory=1, max_num_seqs=4)
    adapters = llm.engine.inputs.adapters
    size = adapters.num_bytes  # of the last
    assert size > 1
    for folder in folders.values():
        shutil.rmtree(folder)  # what was opened stays so
    for adapter in [*folders, *reversed(folders)]:
        assert scored(generated(llm, adapter)) == expected[adapter]
        assert adapters.num_bytes == size
    outputs = llm.generate([PROMPT] * 4, PARAMS, use_tqdm=False, adapter=list(folders))  # all at once
    assert [scored(each) for each in outputs] == [expected[adapter] for adapter in folders]
    generated(llm, "a")
    assert adapters.num_bytes == size


def test_requests_are_refused_by_name(folders: dict[str, str]) -> None:
    plain = LLM(zoo.build("llama"))
    with pytest.raises(AdapterError, match="there is no adapter 'a'"):
        generated(plain, "a")
    with pytest.raises(AdapterError, match="this engine was made without adapters"):
        plain.load_adapter("a", folders["a"])
    llm = LLM(zoo.build("llama"), adapters=folders)
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 adapters; give one each"):
        llm.generate([PROMPT, PROMPT], PARAMS, use_tqdm=False, adapter=["a"])
    with pytest.raises(InvalidRequestError, match="prompt 1: there is no adapter 'z'"):
        llm.generate([PROMPT, PROMPT], PARAMS, use_tqdm=False, adapter=["a", "z"])
    with pytest.raises(AdapterError, match="the name of an adapter is ' '"):
        llm.load_adapter(" ", folders["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapters": ["a"]}, "adapters is .'a'.; it must be a dict of names and folders"),
        ({"adapters": {"": "a"}}, "the name of an adapter is ''"),
        ({"adapters": {"a": 3}}, "the adapter 'a' is 3; it must be a folder's name or a hub id"),
        ({"adapters": {}, "adapter_memory": 0}, "adapter_memory is 0"),
        ({"adapters": {}, "tensor_parallel_size": 2}, "adapters is not supported with a tensor_parallel_size"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(None, **options)


def test_a_wrong_adapter_is_said_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.engine.engine.make_runner", lambda *_: pytest.fail("the model is loaded"))
    with pytest.raises(ModelError, match="the adapter 'a' cannot be used: there is no folder /nowhere"):
        LLM(zoo.build("llama"), adapters={"a": "/nowhere"})


def test_models_that_cannot_have_adapters_say_why() -> None:
    with pytest.raises(ModelError, match="adapters is not supported with a model that does not run packed"):
        LLM(zoo.build("llama"), adapters={}, executor="rows")
    with pytest.raises(ModelError, match="does not run packed"):
        LLM(others.build("bloom"), adapters={})


# ------------------------------------------------------------------------------------- engines in processes


async def _exhaust(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    zoo.build("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("in_process", [False, True])
def test_servers_have_them_too(
    in_process: bool, model_folder: str, folders: dict[str, str], expected: dict[str | None, Any]
) -> None:
    async def check() -> None:
        options: dict[str, Any] = {"restart_delays": (0.0,), "in_process": in_process}
        async with AsyncLLM(model_folder, adapters={"a": folders["a"]}, **options) as llm:

            async def check_all(*adapters: str | None) -> None:
                outputs = await asyncio.gather(*(last(llm, PROMPT, PARAMS, adapter=each) for each in adapters))
                assert [scored(each) for each in outputs] == [expected[each] for each in adapters]

            await check_all(None, "a", None)
            with pytest.raises(AdapterError, match="there is no adapter 'b'"):
                await last(llm, PROMPT, PARAMS, adapter="b")
            with pytest.raises(AdapterError, match="there is no folder /nowhere"):
                await llm.load_adapter("b", "/nowhere")
            await llm.load_adapter("b", folders["b"])
            await check_all("a", "b", None)
            if not in_process:
                stream = llm.generate(PROMPT, replace(PARAMS, max_tokens=150))
                await anext(stream)
                kill_engine(llm)
                with pytest.raises(EngineDeadError):
                    await _exhaust(stream)
            await check_all("b", None, "a")  # a new engine knows what was loaded into the old one
            await llm.unload_adapter("a")
            with pytest.raises(AdapterError, match="there is no adapter 'a'; there are 'b'"):
                await last(llm, PROMPT, PARAMS, adapter="a")

    run(check())


def test_replicas_have_all_of_them(model_folder: str, folders: dict[str, str], expected: dict[str | None, Any]) -> None:
    llm = LLM(model_folder, adapters={"a": folders["a"]}, replicas=2, max_num_seqs=2)
    llm.load_adapter("b", folders["b"])
    with pytest.raises(AdapterError, match="there is no folder /nowhere"):
        llm.load_adapter("c", "/nowhere")
    wanted = ["a", None, "b", "b", None, "a", "a", "b"]
    outputs = llm.generate([PROMPT] * len(wanted), PARAMS, use_tqdm=False, adapter=wanted)
    assert [scored(each) for each in outputs] == [expected[adapter] for adapter in wanted]
