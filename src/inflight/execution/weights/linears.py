"""Replaces a model's linear layers by prepacked ones.

`linear_calls` says which are fused. Weights are prepacked layer by layer, and each original is released at once. No
architecture is special-cased; a prepacked model is proved afterwards (`preparation`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inflight.execution.grouped.weight import GroupedWeight, as_values
from inflight.execution.kernels import kernels_available
from inflight.execution.ranks.rank import behind
from inflight.execution.weights.formats import PLAIN, WeightFormat
from inflight.execution.weights.layers import NarrowLinear, RowActivation, SiblingLinear, SiblingLinears, is_narrow
from inflight.execution.weights.linear_calls import ACTIVATIONS, LinearCalls, is_linear, is_watched
from inflight.execution.weights.prepacked_linear import PrepackedLinear, read_rows_in_groups, share_prepacked_weight

ReleaseWeight: TypeAlias = Callable[[torch.Tensor], None]
"""Releases the memory of a prepacked weight."""


def prepack_linears(
    model: PreTrainedModel,
    calls: LinearCalls,
    weight_format: WeightFormat = PLAIN,
    release: ReleaseWeight | None = None,
) -> None:
    """Replace the linear layers of `model`, which is ours alone, by prepacked ones.

    Args:
        calls: the layers of a forward pass, and which to fuse.
        release: called with each weight `[out, in]` once prepacked.
    """
    release = release or (lambda weight: None)
    embedding, head = behind(model.get_input_embeddings()), behind(model.get_output_embeddings())
    is_tied = head is not None and is_linear(head) and embedding.weight is head.weight
    modules = dict(model.named_modules(remove_duplicate=False))
    originals = {name: modules[name] for name in calls.activations.values()}
    for names in _joinable(calls.siblings, modules):
        members = [modules[name] for name in names]
        together = _together(members, weight_format)
        for number, name in enumerate(names):
            replace_module(model, name, SiblingLinear(together, number))
            release(modules[name].weight)
            modules[name]._parameters.clear()
            modules[name] = nn.Identity()
        del members
    shared: dict[int, PrepackedLinear] = {}  # a module with several names is prepacked once
    for name in list(modules):
        module = modules.pop(name)
        if isinstance(model.get_submodule(name), nn.Identity | SiblingLinear):
            continue
        if is_watched(module):
            continue
        if type(module) in ACTIVATIONS and kernels_available():
            replace_module(model, name, RowActivation(module))
        if not is_linear(module) or not calls.include(name):
            continue
        if id(module) not in shared:
            if not module.weight.is_floating_point():
                continue
            activation = calls.activations.get(name)
            kind = ACTIVATIONS[type(originals[activation])] if activation else ("none", "none")
            shared[id(module)] = weight_format.prepack_linear(*_weight_and_bias(module), *kind)
            if activation:
                replace_module(model, activation, nn.Identity())
        linear = shared[id(module)]
        replace_module(model, name, NarrowLinear(linear) if is_narrow(linear.out_features) else linear)
        if module is head and is_tied:
            share_prepacked_weight(embedding, shared[id(module)])
        if module._parameters:
            release(module.weight)
        module._parameters.clear()
    _settle_groups(model)


def _settle_groups(model: nn.Module) -> None:
    """Handle grouped weights outside called layers: an embedding's, and those of layers that are never called."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not isinstance(parameter.data, GroupedWeight):
                continue
            if isinstance(module, nn.Embedding) and not is_watched(module):
                read_rows_in_groups(module)
                break
            module._parameters[name] = nn.Parameter(as_values(parameter.data), requires_grad=False)


def _joinable(siblings: Sequence[Sequence[str]], modules: Mapping[str, Any]) -> Iterator[list[str]]:
    """The layers reading the same tensor whose weights can be fused, in call order."""
    for names in siblings:
        if not all(name in modules and is_linear(modules[name]) for name in names):
            continue
        together = [names[0]]
        for name in names[1:]:
            if not _can_join(modules[together[-1]].weight, modules[name].weight):
                if len(together) > 1:
                    yield together
                together = []
            together.append(name)
        if len(together) > 1:
            yield together


def _can_join(above: torch.Tensor, below: torch.Tensor) -> bool:
    """Whether weights `[out, in]` can be fused by outputs: both of one dtype, or grouped alike."""
    above, below = above.data, below.data
    if isinstance(above, GroupedWeight) or isinstance(below, GroupedWeight):
        return isinstance(above, GroupedWeight) and above.joins(below)
    return above.dtype == below.dtype


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in place of the one with this name."""
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, module)


def _weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[out, in]` and `[out]` of a linear layer of either kind."""
    weight, bias = module.weight.detach(), module.bias
    return (weight.T if isinstance(module, Conv1D) else weight), None if bias is None else bias.detach()


def _together(members: Sequence[nn.Module], weight_format: WeightFormat) -> SiblingLinears:
    """Fuse linear layers that read the same tensor, in call order."""
    weights, biases = zip(*map(_weight_and_bias, members), strict=True)
    sizes = [weight.shape[0] for weight in weights]
    return SiblingLinears(
        weight_format.prepack_linear(torch.cat(weights), _joined(biases, sizes, weights[0].dtype)), sizes
    )


def _joined(biases: Sequence[torch.Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """The fused bias `[sum(sizes)]` of all layers, `[out]` each, zeros where missing; None if none has one."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([torch.zeros(size, dtype=dtype) if bias is None else bias for bias, size in pairs])
