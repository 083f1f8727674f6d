"""Adapters for tests: trained and saved with PEFT, or random."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

SIZE = 0.3
"""Standard deviation of an adapter's elements. Its product is about as large as a zoo model's weights."""


def save_with_peft(
    model: PreTrainedModel, folder: Path, seed: int, *, is_merged: bool = True, **options: Any
) -> nn.Module:
    """Save an adapter of a model, which stays as it is, in a folder. Returns the model with it, for evaluation.

    Args:
        is_merged: whether it is merged into the weights, the definition. (Merged into an embedding that is the head,
            too, it would change that.)
        options: of PEFT's `LoraConfig`.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, SIZE)
        adapted.save_pretrained(str(folder))
        return (adapted.merge_and_unload() if is_merged else adapted).eval()


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], seed: int, rank: int = 4, **config: Any) -> str:
    """Write a random adapter for modules of the given numbers of inputs and outputs. Returns the folder's name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_inputs, num_outputs) in modules.items():
        for letter, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = SIZE * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def modules_of(model: PreTrainedModel, *endings: str) -> dict[str, tuple[int, int]]:
    """The plain model's linear layers whose names have one of these endings, with their numbers of inputs and
    outputs."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(endings)
    }
