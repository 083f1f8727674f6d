"""Quantised checkpoints run if `transformers` can load them, and are refused otherwise with what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inflight import LLM, ModelError, SamplingParams
from tests import others, zoo

PROMPTS = [list(range(start, start + 30)) for start in range(1, 90, 9)]
FP8 = torch.float8_e4m3fn


def save(folder: Path, quantization: dict[str, Any]) -> None:
    """Save a model that claims to be quantised in this way."""
    zoo.build("qwen3").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def save_fp8(folder: Path) -> None:
    """Save a model in the format of DeepSeek and Qwen: eight-bit layer matrices with a scale for each block."""
    save(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    weights = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.endswith("proj.weight"):
            assert max(weight.shape) <= 128, "one block"
            scale = weight.abs().max() / torch.finfo(FP8).max
            weights[name] = (weight / scale).to(FP8)
            weights[f"{name}_scale_inv"] = scale.view(1, 1).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bit_floats_give_the_results_of_transformers(tmp_path: Path, dtype: str) -> None:
    save_fp8(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    llm = LLM(tmp_path, dtype=dtype, device="cpu", num_blocks=200)
    assert (llm.model_info.executor, llm.model_info.dtype) == ("packed", dtype)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert len({token for each in tokens for token in each}) > 20
    if dtype == "float32":
        assert not any(others.wrong_tokens(plain, p, t) for p, t in zip(PROMPTS, tokens, strict=True))


def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    save(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False})
    with pytest.raises(ModelError, match="cannot be loaded: Loading a GPTQ quantized model requires optimum"):
        LLM(tmp_path)


def test_missing_scales_of_quantised_weights_count_as_missing_weights(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: w for n, w in weights.items() if not n.endswith("_scale_inv")}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="weights"):
        LLM(tmp_path, device="cpu")
