"""`PackedAdapter`: an adapter's matrices as the kernels read them, in the model's dtype."""

from collections.abc import Iterator

import torch
from torch import nn

from inflight.contracts.errors import AdapterError
from inflight.execution.adapters.checkpoint import AdapterCheckpoint, LowRankUpdate
from inflight.execution.adapters.layers import AdaptableLayers, Target
from inflight.execution.kernels import delete_with
from inflight.execution.weights.panels import panels_of

MULTIPLE = 32
"""Inputs: the kernels multiply so many at a time (`kernels/adapters.cpp`)."""


class PackedAdapter:
    """An adapter in memory.

    Args:
        dtype: of the model: float32 or bfloat16.

    Attributes:
        number: what the kernels know it by.
        num_bytes: of its matrices.

    Raises:
        AdapterError: the model has no such layer, or it has another shape.
    """

    def __init__(self, checkpoint: AdapterCheckpoint, layers: AdaptableLayers, dtype: torch.dtype) -> None:
        parts = [
            (target, _down_of(target, down, dtype, is_embedding=update.is_embedding), _up_of(up, dtype))
            for update in checkpoint.updates
            for target, down, up in matrices_of(update, layers)
        ]
        targets, downs, ups = (list(each) for each in zip(*parts, strict=True)) if parts else ([], [], [])
        self.num_bytes = sum(each.nbytes for each in (*downs, *ups))
        self.number: int = torch.ops.inflight.new_adapter(
            layers.num_places,
            [target.place for target in targets],
            [target.first_output for target in targets],
            [target.out_features for target in targets],
            downs,
            ups,
        )
        delete_with(self, torch.ops.inflight.delete_adapter, self.number)


def matrices_of(update: LowRankUpdate, layers: AdaptableLayers) -> Iterator[tuple[Target, torch.Tensor, torch.Tensor]]:
    """What an update changes, with `[rank, in]` and `[out, rank]` of each, the scale in the second. Raises
    `AdapterError` if the model has no such weight."""
    name = update.module
    target = layers.weights.get(name)
    if target is not None:
        yield _fitting(update, target, update.down, update.up.float() * update.scale(len(update.down)))
        return
    while name not in layers.experts and name.endswith(".base_layer"):  # of which PEFT wraps both projections
        name = name.removesuffix(".base_layer")
    if name not in layers.experts:
        raise AdapterError(f"the model has no layer {name} that an adapter can change")
    sizes = update.down.shape[1], update.up.shape[0]
    fitting = [each for each in layers.experts[name] if (each[0].in_features, each[0].out_features) == sizes]
    if len(fitting) != 1 or len(update.down) % len(fitting[0]):
        found = ", ".join(f"{len(each)} of {_shape(each[0])}" for each in layers.experts[name])
        raise AdapterError(
            f"the adapter changes weights [{sizes[1]}, {sizes[0]}] of {name}, with {len(update.down)} rows in all; it "
            f"has experts' weights {found}"
        )
    experts = fitting[0]
    rank = len(update.down) // len(experts)
    downs = update.down.view(len(experts), rank, -1)
    ups = update.up.view(-1, rank, len(experts)).float() * update.scale(rank)
    for number, expert in enumerate(experts):
        yield expert, downs[number], ups[:, :, number]


def _fitting(
    update: LowRankUpdate, target: Target, down: torch.Tensor, up: torch.Tensor
) -> tuple[Target, torch.Tensor, torch.Tensor]:
    if (down.shape[1], up.shape[0]) != (target.in_features, target.out_features):
        raise AdapterError(
            f"the adapter changes a weight [{up.shape[0]}, {down.shape[1]}] of {update.module}; the model's is "
            f"{_shape(target)}"
        )
    return target, down, up


def _shape(target: Target) -> str:
    return f"[{target.out_features}, {target.in_features}]"


def _down_of(target: Target, down: torch.Tensor, dtype: torch.dtype, *, is_embedding: bool) -> torch.Tensor:
    """`[rank, in]` as the kernels read it: filled with zeros to a multiple of inputs; an embedding's rows by token."""
    if is_embedding:
        return down.to(dtype).T.contiguous()
    return nn.functional.pad(down.to(dtype), (0, -target.in_features % MULTIPLE)).contiguous()


def _up_of(up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[out, rank]` in panels."""
    return panels_of(up.to(dtype))
