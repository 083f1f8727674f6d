"""Prefixes loaded from a folder give the same bits as computed ones, without other visible effects."""

import asyncio
import errno
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inflight import LLM, AsyncLLM, ModelError, SamplingParams
from inflight.cli import app
from inflight.contracts.api.outputs import RequestOutput
from inflight.prefix_store import block_file
from inflight.prefix_store.inspection import stored_fingerprints
from tests import others, zoo
from tests.speculation.random_requests import generate, random_requests, said

LONG = 60.0
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
PREFIX = [(7 * place) % 250 for place in range(90)]
PROMPTS = [{"prompt_token_ids": [*PREFIX[: 70 + 10 * each], each, 5, 9]} for each in range(3)]
TEXT = "Tom had a red ball. He liked to play with it in the park. " * 8


def run(llm: LLM, prompts: Any = PROMPTS) -> list[RequestOutput]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    if llm.engine._store is not None:
        llm.engine._store.flush(LONG)
    return outputs


def salted(cache_salt: str | None) -> list[dict[str, Any]]:
    return [{**prompt, "cache_salt": cache_salt} for prompt in PROMPTS]


def restored(llm: LLM) -> int:
    """How many tokens came from the folder."""
    return llm.engine.scheduler.persistence.num_restored_tokens


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "mistral", "gpt_oss", "deepseek_v3", "phi3_longrope", "qwen3_next", "mamba2"]
)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int4"}, {"dtype": "bfloat16"}], ids=["", "int4", "bf16"])
@pytest.mark.thorough("-llama", "bf16-gemma2", "int4-phi3")
def test_a_restored_prefix_has_the_bits_of_a_computed_one(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = others.build(name)
    if "kv_cache_dtype" in options and name in ("gpt_oss", "mamba2"):
        pytest.skip("one cache dtype for each kind of layers is enough")
    options = {"block_size": 4, "prefix_cache_dir": tmp_path, **options}
    expected = run(LLM(model, **{**options, "prefix_cache_dir": None}))
    for number in range(3):
        llm = LLM(model, **options)
        for output, wanted in zip(run(llm), expected, strict=True):
            assert said(output) == said(wanted)
        assert (restored(llm) >= 64) == (number > 0)
        llm.engine.scheduler.block_pool.check([])


def test_random_requests_do_not_notice_a_folder(tmp_path: Path) -> None:
    prompts, params = random_requests(60, "prefix cache")
    options: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    expected = generate(LLM(**options), prompts, params)
    for _ in range(3):
        llm = LLM(**options, prefix_cache_dir=tmp_path, prefix_cache_size=10**7)
        assert llm.engine._store is not None
        llm.engine._store.is_faster = lambda num_blocks, num_states, num_tokens: True  # type: ignore[method-assign]
        for output, wanted in zip(generate(llm, prompts, params), expected, strict=True):
            assert said(output) == said(wanted)
        llm.engine._store.flush(LONG)
        llm.engine.scheduler.block_pool.check([])
    assert restored(llm) > 0
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.thorough
def test_damaged_folders_give_no_wrong_token(tmp_path: Path) -> None:
    expected = run(LLM(), [TEXT, TEXT + "Then"])
    run(LLM(prefix_cache_dir=tmp_path), [TEXT, TEXT + "Then"])
    rng = random.Random(1)
    for _ in range(10):
        paths = sorted(path for path in tmp_path.glob("*/*/*"))
        whole = [path.read_bytes() for path in paths]
        for path in rng.sample(paths, len(paths) // 2):
            kind, data = rng.randrange(4), bytearray(path.read_bytes())
            if kind == 0:
                data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
                path.write_bytes(data)
            elif kind == 1:
                path.write_bytes(data[: rng.randrange(len(data))])
            elif kind == 2:
                path.write_bytes(rng.choice(whole))  # of another block
            else:
                path.unlink()
        llm = LLM(prefix_cache_dir=tmp_path)
        for output, wanted in zip(run(llm, [TEXT, TEXT + "Then"]), expected, strict=True):
            assert said(output) == said(wanted)


def test_salts_and_other_weights_share_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 4, "prefix_cache_dir": tmp_path}
    run(LLM(zoo.build("llama"), **options), salted("one"))
    for model, salt, finds in (
        (zoo.build("llama"), "one", True),
        (zoo.build("llama"), "other", False),
        (zoo.build("llama"), None, False),
        (zoo.build("llama", seed=1), "one", False),
    ):
        llm = LLM(model, **options)
        run(llm, salted(salt))
        assert bool(restored(llm)) == finds


def test_what_changes_bits_changes_the_fingerprint(tmp_path: Path) -> None:
    model = zoo.build("llama")
    run(LLM(model, prefix_cache_dir=tmp_path, block_size=4))
    for changed in ({"block_size": 8}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        llm = LLM(model, **{"prefix_cache_dir": tmp_path, "block_size": 4, **changed})
        run(llm)
        assert restored(llm) == 0
    llm = LLM(model, prefix_cache_dir=tmp_path, block_size=4, max_num_seqs=2, num_threads=1, speculation="off")
    run(llm)
    assert restored(llm) > 0


def test_what_is_aborted_while_it_waits_ends_at_once(tmp_path: Path) -> None:
    (wanted,) = run(LLM(prefix_cache_dir=tmp_path), [TEXT])
    llm = LLM(prefix_cache_dir=tmp_path)
    engine, store = llm.engine, llm.engine._store
    assert store is not None
    accepted = [engine.inputs.accept(str(number), wanted.prompt_token_ids, PARAMS) for number in range(2)]
    for each in accepted:
        engine.submit(each)
    assert engine.scheduler.persistence.is_waiting
    assert engine.scheduler.num_waiting == 2
    (end,) = engine.abort("0")
    assert end.finish_reason == "abort"
    given: list[int] = []
    while engine.has_unfinished_requests:
        given += [token_id for output in engine.step() for token_id in output.new_token_ids]
    assert given == list(wanted.outputs[0].token_ids)
    assert restored(llm) > 0
    engine.scheduler.block_pool.check([])


def test_what_keeps_no_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="prefix_cache_dir is not supported with a model that does not run packed"):
        LLM(others.build("bloom"), prefix_cache_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"prefix_cache_dir '.*file' cannot be used: .*exists"):
        LLM(prefix_cache_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="there is a prefix_cache_dir, but enable_prefix_caching is False"):
        LLM(prefix_cache_dir=tmp_path, enable_prefix_caching=False)


def test_a_prefix_is_kept_before_anybody_needs_it(tmp_path: Path) -> None:
    num_tokens = LLM(prefix_cache_dir=tmp_path).cache_prefix(TEXT)
    llm = LLM(prefix_cache_dir=tmp_path)
    (output,) = run(llm, [TEXT + "One day"])
    assert num_tokens % 16 == 0
    assert restored(llm) == output.metrics.num_cached_tokens >= num_tokens - 16
    with pytest.raises(ValueError, match="there is no prefix_cache_dir to keep a prefix in"):
        LLM().cache_prefix(TEXT)


def test_replicas_keep_a_prefix_in_the_folder_that_they_share(tmp_path: Path) -> None:
    num_tokens = LLM(prefix_cache_dir=str(tmp_path), num_blocks=200, replicas=2).cache_prefix(TEXT)
    (output,) = run(LLM(prefix_cache_dir=tmp_path, num_blocks=200), [TEXT + "One day"])
    assert output.metrics.num_cached_tokens >= num_tokens - 16 > 0


@pytest.mark.parametrize("num_written", [0, 2])
def test_a_prefix_is_kept_only_if_all_of_it_is_saved(
    num_written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, numbers = block_file.write, iter(range(1000))

    def full(*args: Any) -> int:
        if next(numbers) >= num_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(block_file, "write", full)
    llm = LLM(prefix_cache_dir=tmp_path)
    num_blocks = len(llm.tokenizer.encode(TEXT)) // 16
    with pytest.raises(OSError, match=rf"{num_blocks - num_written} blocks of the prefix are not saved in .*No space"):
        llm.cache_prefix(TEXT)
    result = CliRunner().invoke(app, ["cache", "warm", str(tmp_path / "other"), TEXT])
    assert result.exit_code == 1
    assert "is not kept" in result.output
    assert "No space left" in result.output


def test_a_prefix_that_is_deleted_before_it_is_pinned_is_not_kept(tmp_path: Path) -> None:
    llm = LLM(prefix_cache_dir=tmp_path, prefix_cache_size=50_000)
    with pytest.raises(OSError, match="they were deleted"):
        llm.cache_prefix(TEXT)


def test_an_engine_that_is_stopped_saves_what_it_knows(tmp_path: Path) -> None:
    async def run_once() -> None:
        async with AsyncLLM(prefix_cache_dir=str(tmp_path), num_blocks=200) as llm:
            async for _ in llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=1)):
                pass

    asyncio.run(run_once())
    (held,) = stored_fingerprints(tmp_path)
    llm = LLM()
    assert llm.tokenizer is not None
    assert held.num_blocks == len(llm.tokenizer.encode(TEXT)) // 16 > 3
