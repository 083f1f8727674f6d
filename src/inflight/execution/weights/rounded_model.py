"""Quantizes a model's weights one after another, for `EngineConfig.quantization` "int4" and `inflight quantize`."""

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inflight.contracts.api.config import EngineConfig
from inflight.execution.grouped.rounding import Rounding
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.hf.model_class import encoders
from inflight.execution.weights.linear_calls import is_linear, is_watched
from inflight.execution.weights.linears import ReleaseWeight

ENDS = Rounding(8)
"""Bits of the head and the input embedding, often one tied weight, when other weights have four."""
Told: TypeAlias = Callable[[str, torch.Tensor, GroupedWeight], None]
"""Called with the name of a quantized weight, the original and the result."""


def rounding_of(config: EngineConfig) -> Rounding | None:
    """The quantization that `config` applies before preparation; None: none."""
    if config.quantization.method != "int4":
        return None
    return Rounding(4, config.quantization.group_size, config.quantization.minima)


def round_weights(
    model: PreTrainedModel,
    rounding: Rounding,
    dtype: torch.dtype,
    release: ReleaseWeight | None = None,
    told: Told | None = None,
) -> None:
    """Quantize the linear layers and experts of `model`, which is exclusively ours, and with four bits also its input
    embedding. Routers, encoders of images and sound, and already grouped weights are kept.

    Args:
        dtype: the weights' nominal dtype.
        release: called with each weight once quantized.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    of_embedding = [(ends[0], "weight", False)] if rounding.bits == 4 and _is_embedding(ends[0]) else []
    for module, name, has_inputs_first in (*_matrices(model), *of_embedding):
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter.data, GroupedWeight):
            continue
        before = parameter.detach()
        after = (ENDS if module in ends else rounding).rounded(before.mT if has_inputs_first else before, dtype)
        own = nn.Parameter(after.mT if has_inputs_first else after, requires_grad=False)
        for owner, its_name in owners[id(parameter)]:
            owner._parameters[its_name] = own
        if told:
            told(names[id(parameter)], before, after)
        if release:
            release(before)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and not is_watched(module)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[Any, str, bool]]:
    """Weights to quantize: module, parameter name, and whether it is `[…, in, out]`."""
    sizes = model.config.get_text_config().to_dict()
    in_encoders = {module for encoder in encoders(model) for module in encoder.modules()}
    numbers_of_experts = {value for key, value in sizes.items() if re.search(r"(^|_)(num|n)_.*expert", key)}
    for module in list(model.modules()):
        if is_watched(module) or module in in_encoders:
            continue
        if is_linear(module):
            is_router = module.weight.shape[0] in numbers_of_experts
            if not is_router and module.weight.is_floating_point():
                yield module, "weight", isinstance(module, Conv1D)
        elif hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.dim() == 3:
                    yield module, name, module.is_transposed
