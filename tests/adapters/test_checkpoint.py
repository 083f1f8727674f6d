"""Adapter files are read correctly, and unsupported ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, SamplingParams
from inflight.contracts.api.errors import AdapterError, ModelError
from tests import zoo
from tests.adapters.made import modules_of, write_adapter
from tests.adapters.test_batches import scored

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.build("llama"), adapters={})


def written(folder: Path, **config: Any) -> Path:
    write_adapter(folder, modules_of(zoo.build("llama"), "q_proj"), 1, **config)
    return folder


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True: DoRA changes"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA'"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "biases of its own": ({"lora_bias": True}, "lora_bias is True"),
    "single tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "other base weights": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base model's"),
    "no number": ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a number"),
    "a number in a pattern": ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] is None"),
    "no pattern": ({"alpha_pattern": {"(": 3}}, "which is no pattern"),
    "no patterns": ({"alpha_pattern": [3]}, "alpha_pattern is .3.; it must be an object"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_change_the_output_is_refused_by_name(case: str, llm: LLM, tmp_path: Path) -> None:
    config, message = REFUSALS[case]
    with pytest.raises(AdapterError, match=message):
        llm.load_adapter("a", written(tmp_path / "a", **config))
    assert not llm.adapters


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """An adapter with some tensors more, or less, or others."""
    found = load_file(written(folder) / WEIGHTS)
    for name, tensor in tensors.items():
        key = f"base_model.model.{name.replace('__', '.')}"
        found.pop(key, None)
        if tensor is not None:
            found[key] = tensor
    save_file(found, folder / WEIGHTS)
    return folder


Q = "model__layers__0__self_attn__q_proj__lora_"
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "a vector of DoRA's": ({f"{Q}magnitude_vector": torch.ones(64)}, "is no matrix of an adapter"),
    "a bias": ({f"{Q}B__bias": torch.ones(64)}, "is no matrix of an adapter"),
    "a whole layer": ({"lm_head__weight": torch.ones(256, 64)}, "lm_head.weight .256, 64. is no matrix"),
    "one matrix": ({f"{Q}B__weight": None}, r"q_proj has \['lora_A'\]; it must have two"),
    "two ranks": ({f"{Q}B__weight": torch.ones(64, 5)}, r"matrices \[4, 64\] and \[64, 5\], which do not fit"),
    "another model": (
        {f"{Q}A__weight": torch.ones(4, 32)},
        r"a weight \[64, 32\] of .*q_proj; the model's is \[64, 64\]",
    ),
    "another layer": (
        {
            "model__layers__9__mlp__lora_A__weight": torch.ones(4, 64),
            "model__layers__9__mlp__lora_B__weight": torch.ones(64, 4),
        },
        "model.layers.9.mlp is no layer of the model that an adapter can change",
    ),
    "an embedding's matrices": (
        {
            f"{Q}A__weight": None,
            f"{Q}B__weight": None,
            f"{Q}embedding_A": torch.ones(4, 64),
            f"{Q}embedding_B": torch.ones(64, 4),
        },
        "the matrices of model.layers.0.self_attn.q_proj are for an embedding",
    ),
    "whole numbers": ({f"{Q}A__weight": torch.ones(4, 64, dtype=torch.int64)}, "is no matrix of an adapter"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, llm: LLM, tmp_path: Path) -> None:
    tensors, message = TENSORS[case]
    with pytest.raises(AdapterError, match=message):
        llm.load_adapter("a", changed(tmp_path / "a", **tensors))


def test_what_is_no_adapter_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="there is no folder /nowhere"):
        llm.load_adapter("a", "/nowhere")
    with pytest.raises(AdapterError, match=r"is no adapter: there is no adapter_config.json"):
        llm.load_adapter("a", tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        llm.load_adapter("a", tmp_path)
    written(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=r"has neither adapter_model.safetensors nor adapter_model.bin"):
        llm.load_adapter("a", tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing that could be read")
    with pytest.raises(AdapterError, match="cannot be read"):
        llm.load_adapter("a", tmp_path)
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="is no adapter: its file has no tensors"):
        llm.load_adapter("a", tmp_path)
    with pytest.raises(ModelError, match="the adapter 'a' cannot be used"):
        LLM(zoo.build("llama"), adapters={"a": tmp_path})


def test_old_checkpoints_are_read_and_programs_in_them_are_not_run(llm: LLM, tmp_path: Path) -> None:
    llm.load_adapter("new", written(tmp_path))
    (expected,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, adapter="new")
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    llm.load_adapter("old", tmp_path)
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, adapter="old")
    assert scored(output) == scored(expected)
    torch.save({"a": Path("/")}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"holds more than tensors|cannot be read"):
        llm.load_adapter("bad", tmp_path)
    llm.unload_adapter("new")
    llm.unload_adapter("old")


def test_a_scale_is_alpha_by_rank_or_by_its_root(llm: LLM, tmp_path: Path) -> None:
    """Scales the two factors by inverse powers of two, so their product keeps its bits."""
    outputs = []
    for number, config in enumerate(
        ({"lora_alpha": 8}, {"lora_alpha": 4, "use_rslora": True}, {"alpha_pattern": {"q_proj": 8}})
    ):
        folder = written(tmp_path / str(number), **config)
        assert json.loads((folder / CONFIG).read_text())["r"] == 4
        llm.load_adapter(str(number), folder)
        outputs += llm.generate([PROMPT], PARAMS, use_tqdm=False, adapter=str(number))
        llm.unload_adapter(str(number))
    assert scored(outputs[0]) == scored(outputs[1]) == scored(outputs[2])
