"""`PackedAdapter`: an adapter's matrices in the kernels' layout, in the dtypes of the rows."""

from collections.abc import Iterator

import torch
from torch import nn

from inflight.contracts.errors import AdapterError
from inflight.execution.adapters.checkpoint import AdapterCheckpoint, LowRankUpdate, Scaling
from inflight.execution.adapters.layers import AdaptableLayers, AdapterTarget
from inflight.execution.kernels import delete_with
from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.weights.panels import panels_of

MULTIPLE, TOGETHER = 32, 8
"""Inputs and rows that the kernels multiply at a time (`kernels/adapters.h`)."""
LINE = 64
"""Bytes of a line of the processor's cache."""


class PackedAdapter:
    """An adapter in memory.

    Attributes:
        number: the kernels' handle.
        num_bytes: of its matrices.

    Raises:
        AdapterError: the model has no such layer, or it has another shape.
    """

    def __init__(self, checkpoint: AdapterCheckpoint, layers: AdaptableLayers) -> None:
        parts = [
            (target, _down_of(target, down), panels_of(up.to(target.dtype)))
            for update in checkpoint.updates
            for target, down, up in matrices_of(update, checkpoint.scaling, layers)
        ]
        parts.sort(key=lambda part: (part[0].place, part[0].first_output))
        targets = [target for target, _, _ in parts]
        together = _in_one_piece([matrix for _, down, up in parts for matrix in (down, up)])
        downs, ups = together[::2], together[1::2]
        self.num_bytes = sum(each.nbytes for each in together)
        self.number: int = torch.ops.inflight.new_adapter(
            layers.num_places,
            [target.place for target in targets],
            [target.first_output for target in targets],
            [target.out_features for target in targets],
            downs,
            ups,
        )
        delete_with(self, torch.ops.inflight.delete_adapter, self.number)


def matrices_of(
    update: LowRankUpdate, scaling: Scaling, layers: AdaptableLayers
) -> Iterator[tuple[AdapterTarget, torch.Tensor, torch.Tensor]]:
    """The targets of an update, with `[rank, in]` and `[out, rank]` of each, scaled. Raises `AdapterError` if the model
    has no such weight."""
    module, down, up = update.module, update.down, update.up.float()
    sizes = down.shape[1], up.shape[0]
    if (target := layers.weights.get(module)) is not None:
        if update.is_embedding is not target.is_embedding:
            raise AdapterError(
                f"the matrices of {module} are for {'an embedding' if update.is_embedding else 'a linear layer'}"
            )
        if sizes != (target.in_features, target.out_features):
            raise AdapterError(f"the adapter changes a weight {_shape(*sizes)} of {module}; the model's is {target}")
        yield target, down, up * scaling.factor(len(down), module, f"{module}.weight")
        return
    while module not in layers.experts and module.endswith(".base_layer"):  # PEFT wraps one parameter after the other
        module = module.removesuffix(".base_layer")
    if module not in layers.experts:
        raise AdapterError(f"{module} is no layer of the model that an adapter can change")
    parameters = layers.experts[module]
    for name, experts in parameters.items():
        if sizes == (experts[0].in_features, experts[0].out_features) and len(down) % len(experts) == 0:
            rank = len(down) // len(experts)
            factor = scaling.factor(rank, f"{module}.{name}")
            for number, expert in enumerate(experts):
                yield (
                    expert,
                    down.view(-1, rank, sizes[0])[number],
                    up.view(-1, rank, len(experts))[..., number] * factor,
                )
            return
    has = ", ".join(f"{name}, {len(experts)} times {experts[0]}" for name, experts in parameters.items())
    raise AdapterError(f"the adapter changes weights {_shape(*sizes)} of {module}, which has {has}")


def _shape(in_features: int, out_features: int) -> str:
    return f"[{out_features}, {in_features}]"


def _down_of(target: AdapterTarget, down: torch.Tensor) -> torch.Tensor:
    """`[rank, in]` zero-padded to a multiple of inputs, in the kernels' order; for an embedding, rows by token."""
    if target.is_embedding:
        return down.to(target.dtype).T.contiguous()
    filled = nn.functional.pad(down.to(target.dtype), (0, -target.in_features % MULTIPLE))
    rank, num_inputs = filled.shape
    num_whole = rank // TOGETHER * TOGETHER
    whole = filled[:num_whole].view(-1, TOGETHER, num_inputs // MULTIPLE, MULTIPLE).transpose(1, 2)
    return torch.cat([whole.reshape(num_whole, num_inputs), filled[num_whole:]])


def _in_one_piece(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices consecutively in huge pages, in the order in which a step reads them."""
    sizes = [-(-each.nbytes // LINE) * LINE for each in matrices]
    memory, copies, first = untouched_memory(sum(sizes)), [], 0
    for matrix, size in zip(matrices, sizes, strict=True):
        copy = memory[first : first + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        copies.append(copy.copy_(matrix))
        first += size
    return copies
