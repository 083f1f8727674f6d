"""A quantised checkpoint gives the output of the dequantised model in `transformers`, and its weights stay
quantised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import pack_weights
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inflight import LLM, ModelError, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.execution.grouped.checkpoints import find_method
from inflight.execution.grouped.weight import GroupedWeight, Groups, as_values
from inflight.execution.hf.load import load_model
from tests import zoo
from tests.execution import this_cpu
from tests.gguf.files import continuation, tiny
from tests.quantized import checkpoints
from tests.quantized.checkpoints import Quantise, configure, write

LLAMA = tiny("llama")
EXPERTS = tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _groups(size: int) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": size}}}}


FORMATS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "gptq": (checkpoints.gptq(4, 128), GPTQ),
    "gptq in 8 bits": (checkpoints.gptq(8, 64, has_zeros=True), GPTQ | {"bits": 8, "group_size": 64}),
    "gptq in 3 bits": (checkpoints.gptq(3, 32), GPTQ | {"bits": 3, "group_size": 32}),
    "gptq in 2 bits": (checkpoints.gptq(2, 64, has_zeros=True), GPTQ | {"bits": 2, "group_size": 64}),
    "gptq, one group": (checkpoints.gptq(4, -1, has_zeros=True), GPTQ | {"group_size": -1}),
    "gptq in another order": (checkpoints.gptq(4, 64, in_order=False), GPTQ | {"group_size": 64, "desc_act": True}),
    "gptq, version 2": (
        checkpoints.gptq(4, 128, has_zeros=True, version=2),
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
    ),
    "AutoRound": (
        checkpoints.gptq(4, 128),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128},
    ),
    "awq": (
        checkpoints.awq(64),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    ),
    "bitnet": (checkpoints.bitnet, BITNET),
    "W4A16": (checkpoints.compressed(4, 128), COMPRESSED | _groups(128)),
    "W4A16 with zero points": (checkpoints.compressed(4, 32, has_zeros=True), COMPRESSED | _groups(32)),
    "W4A16 in another order": (checkpoints.compressed(4, 64, in_order=False), COMPRESSED | _groups(64)),
    "W8A16": (checkpoints.compressed(8, -1), COMPRESSED),
    "W8A8": (checkpoints.int8, COMPRESSED | {"format": "int-quantized"}),
    "FP8 in blocks": (checkpoints.floats((128, 128)), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "FP8": (checkpoints.floats((0, 0), ".weight_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "FP8 of FBGEMM": (checkpoints.floats(None, ".weight_scale"), {"quant_method": "fbgemm_fp8"}),
    "FP8 of compressed-tensors": (
        checkpoints.floats(None, ".weight_scale"),
        COMPRESSED | {"format": "float-quantized"},
    ),
}
KINDS = {
    "gptq": {"GPTQ 4 bits"},
    "awq": {"AWQ 4 bits"},
    "W8A8": {"compressed-tensors"},
    "FP8 in blocks": {"FP8"},
}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    this_cpu.needs(torch.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_what_its_definition_says(name: str, tmp_path: Path) -> None:
    quantise, settings = FORMATS[name]
    plain = AutoModelForCausalLM.from_pretrained(write(tmp_path, LLAMA, quantise, settings)).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        own = load_model(tmp_path / "quantised", EngineConfig(dtype=str(dtype).removeprefix("torch.")))
        assert not own.inflight_notes
        for key, weight in own.named_parameters():
            assert isinstance(weight.data, GroupedWeight) == key.endswith("proj.weight"), key
            assert torch.equal(as_values(weight.data), plain[key].to(dtype)), key


def test_transformers_reads_floats_of_eight_bits_alike(tmp_path: Path) -> None:
    """(It expands them to bfloat16.)"""
    write(tmp_path, LLAMA, *FORMATS["FP8 in blocks"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype=torch.float32).state_dict()
    own = load_model(tmp_path / "quantised", EngineConfig(dtype="float32"))
    for key, weight in own.named_parameters():
        torch.testing.assert_close(as_values(weight.data), theirs[key].float(), rtol=2**-7, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_transformers_bitnet_gives_alike_logits(linear_class: str, tmp_path: Path) -> None:
    """(Its layers round activations to eight bits, for a token all alike.)"""
    write(tmp_path, LLAMA, checkpoints.bitnet, BITNET | {"linear_class": linear_class})
    own = load_model(tmp_path / "quantised", EngineConfig(dtype="float32")).eval()
    prompt = torch.arange(5, 45)[None]
    with torch.compiler.set_stance("force_eager"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype=torch.float32).eval()
        expected = theirs(prompt).logits
    difference = own(prompt).logits - expected
    assert difference.norm() < 0.05 * (expected - expected.mean(-1, keepdim=True)).norm()


def test_bitnet_numbers_need_not_be_packed_but_are_ternary() -> None:
    numbers = torch.tensor([[-1, 0, 1], [1, 1, 0], [0, -1, -1], [1, 0, 0]])
    method = find_method(BITNET)
    assert method is not None
    for weight in (pack_weights(numbers.to(torch.int8)), numbers.bfloat16()):
        groups = method.read({"": weight, "_scale": torch.tensor([0.5])})
        assert isinstance(groups, Groups)
        assert torch.equal(groups.values(), numbers * 0.5)
    for wrong in (torch.full((1, 3), 3, dtype=torch.uint8), torch.full((4, 3), 0.5)):
        with pytest.raises(ValueError, match="not -1, 0 or 1"):
            method.read({"": wrong, "_scale": torch.tensor([0.5])})
    with pytest.raises(ValueError, match="4 scales, not one"):
        method.read({"": numbers.bfloat16(), "_scale": torch.ones(4)})


@pytest.mark.parametrize("settings", [{"quantization_mode": "online"}, {"use_rms_norm": True}])
def test_bitnet_layers_that_do_more_are_left_to_transformers(settings: dict[str, Any]) -> None:
    assert find_method(BITNET | settings) is None
    assert find_method(BITNET) is not None


@pytest.mark.parametrize("name", ["gptq", "awq", "W4A16", "FP8 in blocks", "gptq in another order"])
def test_experts_stay_packed(name: str, tmp_path: Path) -> None:
    """`transformers` puts all experts' matrices into one parameter while it loads."""
    quantise, settings = FORMATS[name]
    plain = AutoModelForCausalLM.from_pretrained(write(tmp_path, EXPERTS, quantise, settings)).state_dict()
    own = load_model(tmp_path / "quantised", EngineConfig(dtype="float32"))
    experts = [key for key, _ in own.named_parameters() if "experts" in key]
    assert len(experts) == 4
    for key in experts:
        weight = own.get_parameter(key).data
        assert isinstance(weight, GroupedWeight)
        assert torch.equal(as_values(weight), plain[key])
    assert not own.inflight_notes


@pytest.mark.parametrize("name", ["gptq", "gptq in another order", "awq", "W8A8", "FP8 in blocks"])
@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["llama", "experts"])
@pytest.mark.thorough("llama", "qwen3]", "experts-awq")
def test_in_exact_arithmetic_every_token_is_the_plain_models(name: str, model: Any, tmp_path: Path) -> None:
    quantise, settings = FORMATS[name]
    plain = AutoModelForCausalLM.from_pretrained(write(tmp_path, model, quantise, settings)).eval()
    llm = LLM(tmp_path / "quantised", dtype="float32", quantization_arithmetic="exact", num_blocks=60)
    assert llm.model_info.logits_error < 2e-5
    assert llm.model_info.arithmetic == "exact"
    assert llm.model_info.is_batch_invariant
    assert {each.kind for each in llm.model_info.weights} - {"float32"} <= KINDS.get(name, KINDS["gptq"])
    prompts = [[5, 6, 7], [300, 2, 9, 11, 200], list(range(40))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == continuation(plain, prompt, 12)


@pytest.mark.parametrize("name", ["gptq", "awq", "bitnet", "W8A8", "gptq in another order"])
def test_the_fast_arithmetic_is_close_and_batch_invariant(name: str, tmp_path: Path) -> None:
    quantise, settings = FORMATS[name]
    write(tmp_path, EXPERTS, quantise, settings)
    llm = LLM(tmp_path / "quantised", dtype="float32", quantization_arithmetic="fast", num_blocks=60)
    assert 1e-5 < llm.model_info.logits_error < 0.1
    assert llm.model_info.arithmetic == "fast"
    assert llm.model_info.is_batch_invariant


def test_floats_of_eight_bits_have_one_arithmetic_only(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["FP8 in blocks"])
    llm = LLM(tmp_path / "quantised", dtype="float32", num_blocks=60)
    assert llm.model_info.arithmetic == "exact"
    assert llm.model_info.logits_error < 2e-5


def test_experts_in_floats_of_four_bits_are_those_of_gpt_oss(tmp_path: Path) -> None:
    model = zoo.build("gpt_oss")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [each for each in weights if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts, expected[name] = checkpoints.mxfp4(weights.pop(name).float())
        theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
        assert torch.equal(theirs, expected[name])
        weights |= {name + ending: part.contiguous() for ending, part in parts.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    own = load_model(tmp_path, EngineConfig(dtype="float32"))
    assert not own.inflight_notes
    for name, values in expected.items():
        weight = own.get_parameter(name).data
        assert isinstance(weight, GroupedWeight)
        assert torch.equal(weight.values(), values)
    for arithmetic in ("exact", "fast"):
        info = LLM(tmp_path, dtype="float32", quantization_arithmetic=arithmetic, num_blocks=60).model_info
        assert (info.logits_error < 2e-5) == (arithmetic == "exact")
        assert "MXFP4" in {each.kind for each in info.weights}


def test_a_sharded_checkpoint_is_read_as_a_whole(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(write(tmp_path, LLAMA, *FORMATS["gptq"])).state_dict()
    folder = tmp_path / "quantised"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    own = load_model(folder, EngineConfig(dtype="float32"))
    for key, weight in own.named_parameters():
        assert torch.equal(as_values(weight.data), plain[key]), key


def test_what_no_kernel_reads_is_expanded_and_said(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(
        write(tmp_path, LLAMA, checkpoints.gptq(4, 16), GPTQ | {"group_size": 16})
    ).state_dict()
    own = load_model(tmp_path / "quantised", EngineConfig(dtype="float32"))
    assert own.inflight_notes == (
        "14 weights in GPTQ 4 bits are expanded to torch.float32, because no kernel reads them",
    )
    for key, weight in own.named_parameters():
        assert torch.equal(weight, plain[key]), key


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (GPTQ | {"bits": 5}, "GPTQ in 5 bits cannot be read; 2, 3, 4 and 8 can"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin' cannot be read"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ in the layout 'gemv' cannot be read"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "AutoRound in the layout"),
        (COMPRESSED | {"format": "marlin-24"}, "compressed-tensors in the format 'marlin-24' cannot be read"),
    ],
)
def test_other_layouts_are_refused(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    configure(tmp_path, settings)
    with pytest.raises(ModelError, match=problem):
        load_model(tmp_path, EngineConfig())


def test_what_neither_reads_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    configure(tmp_path, {"quant_method": "aqlm"})
    with pytest.raises(ModelError, match="cannot be loaded: Using `aqlm` quantization requires AQLM"):
        load_model(tmp_path, EngineConfig())


def test_weights_of_eight_bits_that_lack_their_scale_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["FP8 in blocks"])
    file = tmp_path / "quantised" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if not name.endswith("_scale_inv")}, file)
    with pytest.raises(ModelError, match="is in torch\\.float8_e4m3fn, and lacks its scale"):
        load_model(file.parent, EngineConfig())


def test_damaged_checkpoints_are_refused_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["gptq"])
    folder = tmp_path / "quantised"
    file = folder / "model.safetensors"
    weights, whole = load_file(file), file.read_bytes()
    name = "model.layers.0.mlp.up_proj"

    def refused(problem: str) -> None:
        with pytest.raises(ModelError, match=problem) as caught:
            load_model(folder, EngineConfig())
        assert "\n" not in str(caught.value)

    file.write_bytes(whole[:-100])
    refused("cannot be read")
    for part, changed, problem in [
        ("scales", None, f"the weight '{name}.weight' cannot be read: it lacks .scales"),
        ("qzeros", weights[f"{name}.qzeros"][:, :3], f"the weight '{name}.weight' cannot be read"),
        ("qweight", weights[f"{name}.qweight"][:-1], "the groups of 256 inputs are given, not of 248"),
        ("g_idx", weights[f"{name}.g_idx"] + 100, f"the weight '{name}.weight' cannot be read"),
        ("scales", torch.full_like(weights[f"{name}.scales"], torch.inf), "scales that are not finite"),
    ]:
        broken = {key: value for key, value in weights.items() if key != f"{name}.{part}"}
        if changed is not None:
            broken[f"{name}.{part}"] = changed.contiguous()
        save_file(broken, file, metadata={"format": "pt"})
        refused(problem)
    file.unlink()
    refused("has no model.safetensors: quantised weights are read out of safetensors only")
