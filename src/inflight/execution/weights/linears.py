"""A model's linear layers, replaced by prepacked ones.

`linear_calls` has seen which of them run as one. Weights are prepacked layer by layer, and each plain copy is let go at
once. Knows modules and tensors, no architecture; whoever prepacks a model proves it afterwards (`preparation`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inflight.execution.kernels import kernels_available
from inflight.execution.weights.formats import PLAIN, WeightFormat
from inflight.execution.weights.linear_calls import ACTIVATIONS, LinearCalls, is_linear
from inflight.execution.weights.prepacked_linear import PrepackedLinear
from inflight.execution.weights.tied_embedding import share_prepacked_weight

LetGo: TypeAlias = Callable[[torch.Tensor], None]
"""Gives back the memory of a weight that was prepacked and is not needed any more."""


def prepack_linears(
    model: PreTrainedModel, calls: LinearCalls, weight_format: WeightFormat = PLAIN, let_go: LetGo | None = None
) -> None:
    """Replace the linear layers of `model`, which is ours alone, by prepacked ones.

    Args:
        calls: what a forward pass called, and what may run as one.
        let_go: called with each weight `[out, in]` as soon as it is prepacked.
    """
    let_go = let_go or (lambda weight: None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and is_linear(head) and embedding.weight is head.weight
    modules = dict(model.named_modules(remove_duplicate=False))
    originals = {name: modules[name] for name in calls.activations.values()}
    for names in calls.siblings:
        if not all(name in modules and is_linear(modules[name]) for name in names):
            continue
        members = [modules[name] for name in names]
        if len({m.weight.dtype for m in members}) > 1:
            continue
        together = SiblingLinears(members, weight_format)
        for number, name in enumerate(names):
            _replace(model, name, SiblingLinear(together, number))
            let_go(modules[name].weight)
            modules[name]._parameters.clear()
            modules[name] = nn.Identity()
        del members
    shared: dict[int, PrepackedLinear] = {}  # a module that has several names is prepacked once
    for name in list(modules):
        module = modules.pop(name)
        if isinstance(model.get_submodule(name), nn.Identity | SiblingLinear):
            continue
        if type(module) in ACTIVATIONS and kernels_available():
            _replace(model, name, RowActivation(module))
        if not is_linear(module) or not module.weight.is_floating_point() or not calls.include(name):
            continue
        if id(module) not in shared:
            activation = calls.activations.get(name)
            kind = ACTIVATIONS[type(originals[activation])] if activation else ("none", "none")
            shared[id(module)] = weight_format.prepack_linear(*_weight_and_bias(module), *kind)
            if activation:
                _replace(model, activation, nn.Identity())
        _replace(model, name, shared[id(module)])
        if module is head and is_tied:
            share_prepacked_weight(embedding, shared[id(module)])
        if module._parameters:
            let_go(module.weight)
        module._parameters.clear()


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, module)


def _weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[out, in]` and `[out]` of a linear layer of either kind."""
    weight, bias = module.weight.detach(), module.bias
    return (weight.T if isinstance(module, Conv1D) else weight), None if bias is None else bias.detach()


class RowActivation(nn.Module):
    """An activation that gives an element the same bits wherever it lies. (torch's own operators compute the ends of a
    thread's share by another routine, with other bits.)"""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.activation, self.variant = ACTIVATIONS[type(original)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…]` to `[…]`. A compiled model runs the original, which the compiler fuses with its neighbours."""
        if torch.compiler.is_compiling() or x.dtype not in (torch.float32, torch.bfloat16):
            return self.original(x)  # type: ignore[no-any-return]
        return torch.ops.inflight.activate(x, self.activation, self.variant)  # type: ignore[no-any-return]


class SiblingLinears:
    """Linear layers that read the same tensor, computed as one when the first of them is called.

    Args:
        members: the layers, in the order of their calls.
    """

    def __init__(self, members: Sequence[nn.Module], weight_format: WeightFormat) -> None:
        weights, biases = zip(*map(_weight_and_bias, members), strict=True)
        self.sizes = [weight.shape[0] for weight in weights]
        bias = _joined(biases, self.sizes, weights[0].dtype)
        self.linear = weight_format.prepack_linear(torch.cat(weights), bias)
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """The output `[…, out]` of one of them for `x` `[…, in]`. They are called in order, with the same `x`."""
        if number == 0:
            self._outputs = self.linear(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._outputs = ()
        return output


def _joined(biases: Sequence[torch.Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([torch.zeros(size, dtype=dtype) if bias is None else bias for bias, size in pairs])


class SiblingLinear(nn.Module):
    """One of several linear layers that are computed as one: it has the place of a `Linear` in the model."""

    def __init__(self, together: SiblingLinears, number: int) -> None:
        super().__init__()
        self.together, self.number = together, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        return self.together.output(x, self.number)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"number {self.number} of {self.together.linear.extra_repr()}"
