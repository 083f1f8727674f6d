"""`AdaptableLayers`: which weights of a prepared model adapters can change, by the names that its own modules had.

Every layer of the kernels has a place, in which it looks for what is added to its rows. Layers that run as one are one
place, where each has outputs of its own; each projection of each expert is a place, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.adapters.adapted_embedding import AdaptedEmbedding
from inflight.execution.kernels import delete_with
from inflight.execution.weights.caught_matrices import CaughtMatrix
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.layers import NarrowLinear, SiblingLinear
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A weight `[out, in]` that an adapter can change.

    Attributes:
        place: where its layer looks.
        first_output: which of the layer's outputs is the weight's first.
        dtype: of the layer's rows.
        is_embedding: whether rows are looked up in it, not multiplied with.
    """

    place: int
    first_output: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    is_embedding: bool = False

    def __str__(self) -> str:
        return f"[{self.out_features}, {self.in_features}]"


STEPS = ((10, 5), (23, 7))
"""Tokens and rows of logits of steps that show how many rows each layer gets. None of them is filled up to more."""


class AdaptableLayers:
    """The places of a model, in which its layers look from now on.

    Args:
        model: ours alone, prepacked.
        run: runs a step of given numbers of tokens and rows of logits.

    Attributes:
        step: the kernels' number of what tells rows their adapters.
        num_places: how many there are.
        weights: what can be changed, by the names of linear layers and of the input embedding, `[vocabulary, hidden]`
            transposed.
        experts: the weights of all experts of a module, by its name: of each of its parameters, by name.
    """

    def __init__(self, model: PreTrainedModel, run: Callable[[int, int], object]) -> None:
        reads_logit_rows = _what_layers_read(model, run)
        self.step: int = torch.ops.inflight.new_adapted_step()
        delete_with(self, torch.ops.inflight.delete_adapted_step, self.step)
        self.num_places = 0
        self.weights: dict[str, AdapterTarget] = {}
        self.experts: dict[str, dict[str, Sequence[AdapterTarget]]] = {}
        self._place_of: dict[int, int] = {}  # by the kernels' number of a layer
        for name, module in model.named_modules(remove_duplicate=False):
            for layer, first_output, num_outputs in _layers_of(module):
                if layer.number in reads_logit_rows or _router_layer(module) is not None:
                    place = self._place(layer, reads_logit_rows=reads_logit_rows.get(layer.number, False))
                    self.weights[name] = AdapterTarget(
                        place, first_output, layer.in_features, num_outputs, layer.weight.dtype
                    )
            if isinstance(module, AdaptedEmbedding):
                place = module.look_in(self.step, self._new_place())
                self.weights[name] = AdapterTarget(
                    place, 0, module.num_embeddings, module.embedding_dim, model.dtype, is_embedding=True
                )
            experts = getattr(module, "inflight_experts", None)
            if isinstance(experts, PrepackedExperts) and experts.run_in_kernel:
                self.experts[name] = {
                    experts.up_name: self._whole(experts.up),
                    experts.down_name: self._whole(experts.down),
                }

    def _whole(self, layers: Sequence[PrepackedLinear]) -> list[AdapterTarget]:
        return [
            AdapterTarget(
                self._place(layer, reads_logit_rows=False),
                0,
                layer.in_features,
                layer.out_features,
                layer.weight.dtype,
            )
            for layer in layers
            if isinstance(layer, PanelLinear)
        ]

    def _place(self, layer: PanelLinear, *, reads_logit_rows: bool) -> int:
        if layer.number not in self._place_of:
            place = self._place_of[layer.number] = self._new_place()
            torch.ops.inflight.adapt_linear(layer.number, self.step, place, reads_logit_rows)
        return self._place_of[layer.number]

    def _new_place(self) -> int:
        self.num_places += 1
        return self.num_places - 1


def _what_layers_read(model: nn.Module, run: Callable[[int, int], object]) -> dict[int, bool]:
    """Of the kernels' layers, by number, those that get a row for each token in every step, or one for each row of
    logits: whether it is the latter."""
    steps = []
    for num_tokens, num_logit_rows in STEPS:
        with _watch_rows(model) as num_rows:
            run(num_tokens, num_logit_rows)
        kinds = {num_tokens: False, num_logit_rows: True}
        steps.append({number: kinds[each] for number, each in num_rows.items() if each in kinds})
    first, second = steps
    return {number: kind for number, kind in first.items() if second.get(number) is kind}


@contextmanager
def _watch_rows(model: nn.Module) -> Iterator[dict[int, int]]:
    """How many rows each of the kernels' layers is given in a forward pass, by its number; experts' are left out."""
    num_rows: dict[int, int] = {}

    def observe(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        num_rows[number] = args[0].numel() // args[0].shape[-1]

    layers = {layer.number: layer for module in model.modules() for layer, _, _ in _layers_of(module)}
    hooks = [layer.register_forward_pre_hook(partial(observe, number)) for number, layer in layers.items()]
    try:
        yield num_rows
    finally:
        for hook in hooks:
            hook.remove()


def _layers_of(module: nn.Module) -> Iterator[tuple[PanelLinear, int, int]]:
    """The layer that computes a module of the model, if there is one; the first of its outputs that is the module's,
    and how many are."""
    match module:
        case SiblingLinear():
            sizes = module.together.sizes
            layer, first, number = module.together.linear, sum(sizes[: module.number]), sizes[module.number]
        case NarrowLinear():
            layer, first, number = module.linear, 0, module.linear.out_features
        case PrepackedLinear():
            layer, first, number = module, 0, module.out_features
        case _:
            router = _router_layer(module)
            if router is None:
                return
            layer, first, number = router, 0, router.out_features
    if isinstance(layer, PanelLinear):
        yield layer, first, number


def _router_layer(module: nn.Module) -> PrepackedLinear | None:
    """What multiplies for a module that does so with a caught matrix, in one dtype. It gets a few rows more than there
    are tokens."""
    weight = module._parameters.get("weight")
    if isinstance(weight, CaughtMatrix) and len(weight.prepacked) == 1:
        return next(iter(weight.prepacked.values()))
    return None
