"""What `quantize` writes is what `quantization=` makes, and it is mapped into memory when it is loaded."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import LLM, ModelError, SamplingParams, quantize
from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.execution.grouped.weight import GroupedWeight, as_values
from inflight.execution.hf.load import load_model
from inflight.execution.weights.layers import SiblingLinear
from tests import zoo
from tests.command import Command
from tests.execution import this_cpu
from tests.gguf.files import continuation, tiny
from tests.gguf.files import write as write_gguf
from tests.quantized import checkpoints

PROMPTS = [{"prompt_token_ids": list(range(start, start + 20))} for start in (1, 30, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    this_cpu.needs(torch.uint8)


def tokens_of(llm: LLM) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def saved(folder: Path, name: str) -> Path:
    copy.deepcopy(zoo.build(name)).save_pretrained(folder / "plain")
    return folder / "plain"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt2", "gpt_oss"])
@pytest.mark.parametrize(
    ("asked", "quantization"),
    [
        ({"format": "int8"}, {"quantization": "int8"}),
        ({}, {"quantization": "int4"}),
        (
            {"group_size": 64, "minima": True},
            {"quantization": "int4", "quantization_group_size": 64, "quantization_minima": True},
        ),
    ],
    ids=str,
)
@pytest.mark.thorough("qwen3_moe")
def test_a_written_checkpoint_is_what_rounding_while_loading_makes(
    name: str, asked: dict[str, Any], quantization: dict[str, Any], tmp_path: Path
) -> None:
    if "int8" in quantization.values():
        this_cpu.needs(torch.int8)
    plain = saved(tmp_path, name)
    became = quantize(plain, tmp_path / "out", **asked, use_tqdm=False)
    kinds = {each.after for each in became}
    assert kinds == {"int8", "float32"} | {quantization["quantization"]}
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    total = sum(each.bytes_after for each in became)
    assert total <= size < total + 50_000
    options = {"dtype": "float32", "num_blocks": 60, "quantization_arithmetic": "fast"}
    written, made = LLM(tmp_path / "out", **options), LLM(plain, **options, **quantization)
    assert tokens_of(written) == tokens_of(made)
    assert all(note.startswith("every step runs in Python") for note in written.model_info.notes)
    assert written.model_info.is_batch_invariant


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2"])
def test_in_exact_arithmetic_every_token_is_the_plain_models(name: str, tmp_path: Path) -> None:
    quantize(saved(tmp_path, name), tmp_path / "out", use_tqdm=False)
    llm = LLM(tmp_path / "out", dtype="float32", quantization_arithmetic="exact", num_blocks=60)
    assert llm.model_info.logits_error < 2e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    own = dict(load_model(tmp_path / "out", EngineConfig(dtype="float32")).named_parameters())
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(as_values(own[key].data))
    for prompt, tokens in zip(PROMPTS, tokens_of(llm), strict=True):
        assert list(tokens) == continuation(plain, prompt["prompt_token_ids"], 12)


def test_loading_copies_no_weight_not_even_those_that_run_as_one(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "out", use_tqdm=False)
    llm = LLM(tmp_path / "out", dtype="float32", quantization_arithmetic="exact", num_blocks=60)
    file = str((tmp_path / "out" / "model.safetensors").resolve())
    ranges = [
        tuple(int(address, 16) for address in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(file)
    ]
    modules = list(llm.engine.runner.model.modules())
    siblings = [module.together.linear for module in modules if isinstance(module, SiblingLinear)]
    assert len(siblings) == 10
    for layer in [*siblings, *(module for module in modules if hasattr(module, "prepacked"))]:
        place = layer.prepacked.data_ptr()
        assert any(begin <= place < end for begin, end in ranges), layer
    with safe_open(file, framework="pt") as content:
        assert content.get_tensor("lm_head.weight").dtype == torch.uint8


def test_what_is_in_a_few_bits_already_stays_so(tmp_path: Path) -> None:
    model = tiny("llama")
    write_gguf(tmp_path / "model.gguf", model, lambda name: "Q4_K" if "ffn" in name else "BF16")
    became = quantize(tmp_path / "model.gguf", tmp_path / "out", use_tqdm=False)
    assert {each.after for each in became if "mlp" in each.name} == {"Q4_K"}
    assert {each.after for each in became if "self_attn" in each.name} == {"int4"}
    before, after = (load_model(tmp_path / name, EngineConfig(dtype="float32")) for name in ("model.gguf", "out"))
    for name, parameter in after.named_parameters():
        if "mlp" in name:
            assert torch.equal(as_values(parameter.data), as_values(before.get_parameter(name).data))


def test_inputs_in_another_order_are_kept(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    checkpoints.write(tmp_path, tiny("llama"), checkpoints.gptq(4, 64, in_order=False), settings)
    quantize(tmp_path / "quantised", tmp_path / "out", use_tqdm=False)
    before, after = (load_model(tmp_path / name, EngineConfig(dtype="float32")) for name in ("quantised", "out"))
    layer = after.model.layers[0].mlp.down_proj.weight.data
    assert isinstance(layer, GroupedWeight)
    assert layer.matrices[0].order is not None
    for name, parameter in after.named_parameters():
        if "proj" in name:
            assert torch.equal(as_values(parameter.data), as_values(before.get_parameter(name).data))


def test_the_command_writes_a_model_that_chats(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    done = command("quantize", str(DEMO_MODEL), str(out), "--minima")
    assert done.returncode == 0, done.stderr
    assert f"Run it: inflight chat {out}" in done.stdout
    assert "model.layers.*.mlp.down_proj" in done.stdout
    llm = LLM(out)
    assert llm.tokenizer is not None
    expected = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert llm.tokenizer.encode("Once upon a time") == expected.encode("Once upon a time")
    assert llm.model_info.eos_token_ids == LLM().model_info.eos_token_ids
    assert llm.chat([{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=5))[0].outputs[0].text
    assert "…" not in done.stdout
    nowhere = command("quantize", str(tmp_path / "nowhere"), str(tmp_path / "other"))
    assert nowhere.stderr.startswith(f"inflight: there is no model folder '{tmp_path}/nowhere'")
    again = command("quantize", str(DEMO_MODEL), str(out))
    assert again.returncode == 2
    assert again.stderr == f"inflight: '{out}' exists already; give another folder\n"


def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(saved(tmp_path, "llama"), out, use_tqdm=False)
    file, config = out / "model.safetensors", out / "config.json"
    whole, settings = file.read_bytes(), json.loads(config.read_text())

    def refused(problem: str) -> None:
        with pytest.raises(ModelError, match=problem) as caught:
            load_model(out, EngineConfig())
        assert "\n" not in str(caught.value)

    file.write_bytes(whole[:-100])
    refused("cannot be read")
    file.write_bytes(whole)
    config.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "inflight", "version": 99}}))
    refused("another version of inflight")
    config.write_text(json.dumps(settings))
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata()
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    for changed, problem in [
        (weights | {name: weights[name][:, :-1].contiguous()}, f"the weight '{name}' cannot be read"),
        ({key: weight for key, weight in weights.items() if key != name}, "lacks some of the model's weights"),
    ]:
        save_file(changed, file, metadata=metadata)
        refused(problem)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"format": "int5"}, "format is 'int5'; it may be 'int4' or 'int8'"),
        ({"format": "int8", "minima": True}, "quantization_minima are of quantization 'int4'"),
        ({"group_size": 48}, "quantization_group_size is 48; it must be one of 32, 64, 128"),
    ],
)
def test_wrong_options_are_refused(asked: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        quantize(DEMO_MODEL, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()
