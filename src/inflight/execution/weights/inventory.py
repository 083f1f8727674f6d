"""Storage formats of a prepacked model's weights."""

from collections.abc import Iterator

import torch
from torch import nn

from inflight.contracts.model_info import StoredWeights
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.grouped_linear import GroupedLinear
from inflight.execution.weights.layers import SiblingLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


def stored_weights(model: nn.Module) -> tuple[StoredWeights, ...]:
    """All weights by storage format, each once; the largest share first."""
    seen: dict[int, tuple[str, int]] = {}
    for module in model.modules():
        for kind, key, num_bytes in _of_module(module):
            seen[key] = kind, num_bytes
    totals: dict[str, list[int]] = {}
    for kind, num_bytes in seen.values():
        totals.setdefault(kind, []).append(num_bytes)
    stored = [StoredWeights(kind, len(sizes), sum(sizes)) for kind, sizes in totals.items()]
    return tuple(sorted(stored, key=lambda each: -each.num_bytes))


def arithmetic_of(model: nn.Module) -> str | None:
    """The arithmetic of grouped weights, as in `EngineConfig.quantization_arithmetic`; None if there are none."""
    layers = [layer for module in model.modules() for layer in _layers(module)]
    if any(layer.scales is not None for layer in layers):  # int8, as are the activations
        return "fast"
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    return None if not grouped else "exact" if all(layer.is_exact for layer in grouped) else "fast"


def _layers(module: nn.Module) -> Iterator[PrepackedLinear]:
    """A module's own prepacked layers."""
    experts = getattr(module, "inflight_experts", None)
    if isinstance(experts, PrepackedExperts):
        yield from (*experts.up, *experts.down)
    if isinstance(module, SiblingLinear):
        yield module.together.linear
    elif isinstance(module, PrepackedLinear):
        yield module


def _of_module(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Format, identity and bytes of a module's own weights."""
    for layer in _layers(module):
        kind = layer.kind if isinstance(layer, GroupedLinear) else _name(layer.prepacked.dtype)
        num_bytes = layer.prepacked.numel() * layer.prepacked.dtype.itemsize
        yield kind, id(layer), num_bytes + (0 if layer.scales is None else layer.scales.nbytes)
    for parameter in module.parameters(recurse=False):
        weight = parameter.data
        if isinstance(weight, GroupedWeight):
            yield weight.kind, id(weight.matrices[0].panels), weight.num_bytes
        elif weight.device.type != "meta":
            yield _name(weight.dtype), id(parameter), weight.nbytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
