"""A proof on a proxy holds for its model, and its proof result is cached until one of its inputs changes."""

import os
import random
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from inflight import LLM, ModelError, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.execution.executors import PackedExecutor, RowsExecutor
from inflight.execution.hf.load import load_model
from inflight.execution.preparation import choice, own_attention, packed_proof, proof_result, result_cache
from inflight.execution.preparation.choice import EARLIER, ITSELF, PACKED, PROXY, ChosenExecutor, choose_executor
from inflight.execution.preparation.proof import PlainModel
from inflight.execution.preparation.proof_result import ProofResult, RunMode, proof_key
from inflight.execution.preparation.result_cache import ResultCache
from tests import others, zoo
from tests.execution import this_cpu

BUILD = dict.fromkeys(zoo.ARCHITECTURES, zoo.build) | dict.fromkeys(others.ALL | others.OTHERS, others.build)


def choose(
    model: PreTrainedModel, proof_results: ResultCache[ProofResult] | None = None, **options: Any
) -> ChosenExecutor:
    config = EngineConfig(**options)
    return choose_executor(load_model(model, config), config, proof_results=proof_results)


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LARGE", 0)


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch, all_are_large: None) -> list[PreTrainedModel]:
    """The models of which proxies were made."""
    made: list[PreTrainedModel] = []
    make = choice.make_proxy

    def counted(model: PreTrainedModel) -> PlainModel:
        made.append(model)
        return make(model)

    monkeypatch.setattr(choice, "make_proxy", counted)
    return made


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.thorough("llama", "gemma2", "qwen3_moe", "bloom", "mamba]", "qwen3_next")
def test_a_proof_on_a_twin_gives_the_result_of_a_proof_on_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BUILD[name](name)
    itself = choose(model)
    monkeypatch.setattr(choice, "LARGE", 0)
    by_twin = choose(model)
    made = [each.make_executor(4, 2) for each in (itself, by_twin)]
    assert len({(type(each), getattr(each, "in_one_piece", None), getattr(each, "pads", None)) for each in made}) == 1
    in_one_piece = getattr(made[1], "in_one_piece", False)  # a proof on the model might have found a better way
    assert (itself.proved_on, by_twin.proved_on) == (ITSELF, ITSELF if in_one_piece else PROXY)
    assert by_twin.report.specs == itself.report.specs
    assert by_twin.report.max_model_len == itself.report.max_model_len
    assert by_twin.report.logits_error < 2e-5 or name == "deep"


@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_next", "rwkv"])
def test_a_large_model_gives_its_plain_tokens(name: str, all_are_large: None) -> None:
    model = BUILD[name](name)
    llm = LLM(model, **others.options(num_blocks=200))
    assert llm.model_info.proved_on == PROXY
    chance = random.Random(0)
    prompts = [[chance.randrange(1, zoo.VOCAB_SIZE) for _ in range(length)] for length in (1, 40, 23)]
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert not others.wrong_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_next"])
def test_a_proof_on_a_proxy_is_cached(name: str, proxies: list[PreTrainedModel], tmp_path: Path) -> None:
    model, folder = BUILD[name](name), tmp_path / "made" / "when needed"
    first = choose(model, ResultCache(folder, ProofResult))
    assert len(proxies) == 1
    second = choose(model, ResultCache(folder, ProofResult))
    assert len(proxies) == 1
    assert (first.proved_on, second.proved_on) == (PROXY, PROXY + EARLIER)
    assert second.report == first.report
    assert len(list(folder.iterdir())) == len(list(folder.parent.iterdir())) == 1, "nothing half written is left"


def test_a_wrong_proof_result_is_dropped(proxies: list[PreTrainedModel], tmp_path: Path) -> None:
    """A cached proof result wrongly says that BLOOM runs packed. The model itself fails, so the other ways are proved
    again."""
    model, proof_results = BUILD["bloom"]("bloom"), ResultCache(tmp_path, ProofResult)
    key = proof_key(model, EngineConfig())
    proof_results.keep(key, ProofResult(PACKED))
    found = choose(model, proof_results)
    assert (found.proved_on, type(found.make_executor(4, 2)).__name__) == (PROXY, "RowsExecutor")
    assert any(note.startswith("not packed: BloomForCausalLM does its attention itself") for note in found.report.notes)
    assert proof_results.find(key) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_differs_from_its_proxy_is_proved_again(
    dtype: str, proxies: list[PreTrainedModel], tmp_path: Path
) -> None:
    """From the third layer on, layers look one row back; a proxy with two layers does not show this."""
    base = zoo.build("llama")

    class LooksBack(type(base)):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            for layer in self.model.layers[2:]:
                layer.mlp.register_forward_hook(lambda module, args, given: given + pad(given, (0, 0, 1, -1)))

    model = LooksBack(base.config).eval().requires_grad_(False)
    model.load_state_dict(base.state_dict())
    proof_results = ResultCache(tmp_path, ProofResult)
    for _ in range(2):
        found = choose(model, proof_results, dtype=dtype)
        assert not isinstance(found.make_executor(4, 2), PackedExecutor)
        assert any("does not give the plain model's results" in note for note in found.report.notes)
    assert not list(tmp_path.iterdir()), "what is wrong for the model is not remembered"


def test_an_executor_has_another_way_if_the_model_fails_with_the_first(
    all_are_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = own_attention._compare

    def fail_if_padded(mode: RunMode, plain: PlainModel, **options: bool) -> float:
        if mode.pads:
            raise ModelError("not padded")
        return compare(mode, plain, **options)

    monkeypatch.setattr(own_attention, "_compare", fail_if_padded)
    found = choose(others.build("bloom"))
    made = found.make_executor(4, 2)
    assert isinstance(made, RowsExecutor)
    assert not made.pads
    assert "not rows with prompts in pieces, padded: not padded" in found.report.notes


def test_no_proof_result_is_stored_if_the_weights_cannot_be_prepacked(
    all_are_large: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: PreTrainedModel, *args: Any, **options: Any) -> None:
        for weight in model.parameters():
            weight.mul_(-1)

    this_cpu.needs(torch.bfloat16)
    proof_results = ResultCache(tmp_path, ProofResult)
    monkeypatch.setattr(packed_proof, "prepack_experts", spoil)
    with pytest.raises(RuntimeError, match="the weights of LlamaForCausalLM could not be prepacked"):
        choose(zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(torch.bfloat16), proof_results)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_a_proof_result_without_int8_does_not_apply_to_int8(
    option: dict[str, str], all_are_large: None, tmp_path: Path
) -> None:
    proof_results, model = ResultCache(tmp_path, ProofResult), others.build("bloom").to(torch.bfloat16)
    others.build.cache_clear()
    choose(model, proof_results)
    with pytest.raises(ModelError, match="is not supported with a model that does not run packed"):
        choose(model, proof_results, **option)


def test_weights_are_checked_at_every_load(all_are_large: None, tmp_path: Path) -> None:
    proof_results = ResultCache(tmp_path, ProofResult)
    assert choose(zoo.build("llama"), proof_results).proved_on == PROXY
    broken = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    broken.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    (remembered,) = tmp_path.iterdir()
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            ModelError, match=r"^the logits of LlamaForCausalLM are not finite .*: are its weights intact\?$"
        ):
            choose(broken, proof_results, dtype=dtype)
    assert remembered.exists(), "it is not the class's fault"


def test_the_key_of_a_proof_changes_only_with_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")

    def key(model: PreTrainedModel = model, **options: Any) -> str | None:
        return proof_key(model, EngineConfig(**options))

    first = key()
    assert key(zoo.draw("llama", zoo.FACTORS["llama"], seed=7)) == first, "other weights"
    assert key(max_num_seqs=3, seed=1) == first
    others_ = [key(zoo.build("qwen3")), key(executor="packed"), key(attention_backend="torch")]
    others_ += [key(quantization="int8"), key(kv_cache_dtype="int8")]
    attends = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    attends.set_attn_implementation("sdpa" if model.config._attn_implementation == "eager" else "eager")
    others_.append(key(attends))
    others_.append(key(zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(torch.bfloat16)))
    changed = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    changed.config.rms_norm_eps *= 2
    others_.append(key(changed))
    monkeypatch.setattr(proof_result, "version", lambda name: "0.0")
    others_.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(proof_result, "SOURCES", tmp_path)
    others_.append(key())
    assert None not in others_
    assert len({first, *others_}) == 1 + len(others_)


def test_a_key_is_none_if_a_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in a checkout that was not installed and has no version."""

    def fail(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(proof_result, "version", fail)
    assert proof_key(zoo.build("llama"), EngineConfig()) is None


def test_a_class_without_a_source_file_has_no_key(all_are_large: None, tmp_path: Path) -> None:
    """Classes in a notebook have no file and can change without a trace."""
    namespace: dict[str, Any] = {"Base": type(zoo.build("llama")), "__name__": "nowhere"}
    exec("class Written(Base): pass", namespace)
    model = namespace["Written"](zoo.build("llama").config).eval().requires_grad_(False)
    assert proof_key(model, EngineConfig()) is None
    assert choose(model, ResultCache(tmp_path, ProofResult)).proved_on == PROXY
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    proof_results = ResultCache(tmp_path, ProofResult)
    proof_results.keep("key", ProofResult(PACKED))
    whole = (tmp_path / "key").read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            (tmp_path / "key").write_bytes(damaged)
            assert proof_results.find("key") is None
    ResultCache(tmp_path, RunMode).keep("key", RunMode("rows"))  # another type, as of another version
    assert proof_results.find("key") is None


def test_old_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MAX_RESULTS", 2)
    proof_results = ResultCache(tmp_path, ProofResult)
    for number in range(4):
        proof_results.keep(str(number), ProofResult(PACKED))
        os.utime(tmp_path / str(number), ns=(number, number))
    proof_results.keep("new", ProofResult(PACKED))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "new"]


def test_an_unwritable_folder_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", None):
        proof_results = ResultCache(folder, ProofResult)
        proof_results.keep("key", ProofResult(PACKED))
        assert proof_results.find("key") is None
        proof_results.forget("key")


def test_a_proof_result_survives_a_round_trip(tmp_path: Path) -> None:
    said = ProofResult(RunMode("rows", in_one_piece=True), {"packed": 'it has "quotes"\n'}, True, "no")
    ResultCache(tmp_path, ProofResult).keep("key", said)
    assert ResultCache(tmp_path, ProofResult).find("key") == said


def test_a_proof_is_made_again_where_that_is_asked_for(proxies: list[PreTrainedModel], tmp_path: Path) -> None:
    for number, verify in enumerate((True, False, True, False)):
        found = choose(zoo.build("llama"), ResultCache(tmp_path, ProofResult), verify=verify)
        assert found.proved_on == PROXY + EARLIER * (not verify)
        assert len(proxies) == 1 + number // 2


def test_the_model_itself_is_proved_if_it_has_no_proxy(all_are_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: PreTrainedModel) -> None:
        raise ModelError("there is none")

    monkeypatch.setattr(choice, "make_proxy", fail)
    for name in ("llama", "bloom"):
        assert choose(BUILD[name](name)).proved_on == ITSELF
    assert choose(zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(torch.bfloat16)).proved_on == ITSELF
    with pytest.raises(ModelError, match="there is none"):
        choose(others.build("bloom"), dtype="bfloat16")
