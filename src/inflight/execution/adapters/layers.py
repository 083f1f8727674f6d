"""`AdaptableLayers`: the weights of a prepared model that adapters can change, by their original names.

Every kernel layer has a place, where it finds the updates of its rows. Fused layers share one place, with separate
outputs; each projection of each expert has its own place.

An input embedding with adapters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.kernels import delete_with
from inflight.execution.weights.caught_matrices import CaughtMatrix
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.layers import NarrowLinear, SiblingLinear
from inflight.execution.weights.linear_calls import is_watched
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class AdaptedEmbedding(nn.Embedding):
    """An embedding that adds adapters' updates once attached. A subclass's operations on rows (a scale, say) apply to
    the sums."""

    _place: tuple[int, int] | None = None

    def look_in(self, step: int, place: int) -> int:
        """Attach it to a place and step of the kernels. Returns the place."""
        self._place = step, place
        return place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
        rows = super().forward(input)
        if self._place is None:
            return rows
        flat, ids = rows.view(-1, rows.shape[-1]), input.reshape(-1)
        adapted: torch.Tensor = torch.ops.inflight.adapted_rows.default(flat, ids, *self._place)
        return adapted.view(rows.shape)


def make_embedding_adaptable(model: PreTrainedModel) -> None:
    """Turn the input embedding of `model`, which is exclusively ours and not prepacked yet, into an
    `AdaptedEmbedding`."""
    embedding = model.get_input_embeddings()
    kind = type(embedding)
    if not isinstance(embedding, nn.Embedding) or is_watched(embedding):
        return
    embedding.__class__ = (
        AdaptedEmbedding if kind is nn.Embedding else type(f"Adapted{kind.__name__}", (kind, AdaptedEmbedding), {})
    )


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A weight `[out, in]` that an adapter can change.

    Attributes:
        place: its layer's place.
        first_output: the weight's first output in the layer.
        dtype: of the layer's rows.
        is_embedding: whether it is an embedding table.
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
"""Tokens and logit rows of steps that show how many rows each layer gets. None of them is padded."""


class AdaptableLayers:
    """The places of a model, attached to its layers.

    Args:
        model: ours alone, prepacked.
        run: runs a step of given numbers of tokens and rows of logits.

    Attributes:
        step: the kernels' handle of the row assignment.
        num_places: number of places.
        weights: adaptable weights, by the names of linear layers and of the input embedding, `[vocabulary, hidden]`
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
    """For kernel layers, by handle, that get a row per token or per logit row in every step: whether it is the
    latter."""
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
    """Rows of each kernel layer in a forward pass, by handle, without experts."""
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
    """The layer that computes a module, if any, with the first and the number of the module's outputs in it."""
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
    """The layer of a module with a caught matrix, in one dtype. It gets a few padding rows."""
    weight = module._parameters.get("weight")
    if type(weight) is CaughtMatrix and len(weight.prepacked) == 1:
        return next(iter(weight.prepacked.values()))
    return None
