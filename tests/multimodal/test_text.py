"""Checkpoints of models that also read images or sound write text as `transformers` does, and their encoders stay
unread."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel, Qwen3_5ForConditionalGeneration

from inflight import LLM, SamplingParams
from inflight.census.sensitive import sensitive_model
from inflight.census.tiny_configs import tiny_config
from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.hf.model_class import encoder_parameters, encoders
from inflight.execution.kernels import kernels_available
from tests import zoo
from tests.multimodal.models import tiny

PROMPTS = [[7, 8, 9, 10] * 6, [11, 12], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "mistral3", "qwen2_audio"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16."""
    path = tmp_path_factory.mktemp(request.param)
    model = tiny(request.param).to(torch.bfloat16)
    model.config.get_text_config().dtype = torch.bfloat16
    model.save_pretrained(path)
    return path


def plain(folder: Path) -> list[list[int]]:
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [zoo.plain_greedy(model, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]


def generated(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def loaded_model(llm: LLM) -> PreTrainedModel:
    model: Any = llm.engine.runner.executor.model
    assert isinstance(model, PreTrainedModel)
    return model


def test_text_is_that_of_the_plain_model_and_encoders_stay_as_they_are_in_the_file(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", num_blocks=64)
    assert llm.model_info.executor == "packed"
    assert generated(llm) == plain(folder)
    model = loaded_model(llm)
    unread = encoder_parameters(model)
    kinds = {(id(each) in unread, each.dtype) for each in model.parameters() if each.is_floating_point()}
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}


def test_a_checkpoint_that_names_its_multimodal_class_is_loaded_by_it(tmp_path: Path) -> None:
    """Qwen 3.5 has a class for text alone, too, by which its images could not be read."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 8}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = CONFIG_MAPPING["qwen3_5"](text_config=tiny_config("qwen3_5").to_dict(), vision_config=vision)
    model = sensitive_model(Qwen3_5ForConditionalGeneration, config)[0]
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32", num_blocks=64)
    assert llm.model_info.model_class == "Qwen3_5ForConditionalGeneration"
    assert (llm.model_info.executor, llm.model_info.is_recorded) == ("packed", kernels_available())
    assert llm.model_info.input_modalities == ("image", "video")
    assert generated(llm) == plain(tmp_path)


@pytest.mark.skipif(not kernels_available(), reason="quantization needs a C++ compiler")
def test_encoders_are_not_quantized(folder: Path) -> None:
    model = loaded_model(LLM(folder, dtype="float32", quantization="int4", num_blocks=64))
    encoded = {id(module) for encoder in encoders(model) for module in encoder.modules()}
    grouped = [
        id(module) in encoded
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if isinstance(parameter.data, GroupedWeight)
    ]
    assert True not in grouped
    assert all(not isinstance(each.data, GroupedWeight) for part in encoders(model) for each in part.parameters())


def test_a_model_that_reads_its_prompt_in_both_directions_runs_in_its_own_generate() -> None:
    model = tiny("paligemma")
    with pytest.raises(ModelError, match="reads a prompt in both directions"):
        LLM(copy.deepcopy(model), executor="packed", num_blocks=64)
    given = torch.tensor([[5, 6, 7, 8, 9]])
    expected = copy.deepcopy(model).generate(given, max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    llm = LLM(model, num_blocks=64, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": given[0].tolist()}, params, use_tqdm=False)
    assert (llm.model_info.executor, list(output.outputs[0].token_ids)) == ("generate", expected)
