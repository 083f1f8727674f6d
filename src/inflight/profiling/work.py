"""A decode step's least work: reading weights and cache, and the arithmetic of its linear layers.

It is counted from the model's tensors and the sequences' lengths; nothing is measured here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.layers import SiblingLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear

Weight: TypeAlias = tuple[torch.Tensor, int]
"""A weight's stored size, and its number of elements."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One decode step's least work.

    Attributes:
        weight_bytes: the matrices of all linear layers, as stored, each once. Embeddings count only if they are the
            output head, because a step reads only a few rows of them.
        expert_bytes: likewise, those of the experts that a step's tokens choose, if they choose at random.
        linear_operations: multiplications and additions of every row with every weight, except weights of experts.
        cache_bytes: keys and values that the step's queries may see, and their scales, if any.
    """

    weight_bytes: int
    expert_bytes: int
    linear_operations: int
    cache_bytes: int

    @property
    def num_bytes(self) -> int:
        """Weights and cache, read once."""
        return self.weight_bytes + self.expert_bytes + self.cache_bytes


def decode_work(
    model: nn.Module, specs: Sequence[AttentionSpec], backend: AttentionBackend, block_size: int, lengths: Sequence[int]
) -> StepWork:
    """Return the work of a step that gives one token to each of several sequences.

    Args:
        specs: the attention calls of a forward pass.
        lengths: how many keys each sequence's query attends to, including its own.
    """
    linears = list(_linear_weights(model))
    cache_bytes = 0.0
    for spec in specs:
        bytes_per_token = backend.bytes_per_block(spec) / block_size
        cache_bytes += bytes_per_token * sum(_num_visible(spec, length) for length in lengths)
    return StepWork(
        weight_bytes=sum(weight.nbytes for weight, _ in linears),
        expert_bytes=round(sum(_expert_bytes(module, len(lengths)) for module in model.modules())),
        linear_operations=2 * len(lengths) * sum(size for _, size in linears),
        cache_bytes=round(cache_bytes),
    )


def has_prepacked_linears(model: nn.Module) -> bool:
    """Whether any of a model's linear layers was prepacked."""
    return any(isinstance(module, PrepackedLinear | SiblingLinear) for module in model.modules())


def _linear_weights(model: nn.Module) -> Iterator[Weight]:
    """The weights of all linear layers, each once."""
    seen: set[int] = set()
    for module in model.modules():
        for weight, size in _own_linear_weights(module):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight, size


def _own_linear_weights(module: nn.Module) -> Iterator[Weight]:
    if isinstance(module, SiblingLinear):
        yield _prepacked(module.together.linear)
    elif isinstance(module, PrepackedLinear):
        yield _prepacked(module)
    elif not isinstance(module, nn.Embedding):
        yield from ((each, each.numel()) for each in module.parameters(recurse=False) if each.dim() == 2)


def _expert_bytes(module: nn.Module, num_tokens: int) -> float:
    """The weights of a module's own experts that `num_tokens` are expected to choose: all, where it is not
    known how many a token chooses."""
    num_bytes = float(sum(each.nbytes for each in module.parameters(recurse=False) if each.dim() > 2))
    experts = getattr(module, "inflight_experts", None)
    if isinstance(experts, PrepackedExperts):
        prepacked = sum(each.prepacked.nbytes for each in (*experts.up, *experts.down))
        num_bytes += prepacked * (1 - (1 - experts.num_chosen / len(experts.up)) ** num_tokens)
    return num_bytes


def _prepacked(linear: PrepackedLinear) -> Weight:
    return linear.prepacked, linear.in_features * linear.out_features


def _num_visible(spec: AttentionSpec, length: int) -> int:
    """Return how many of `length` keys the last position's query may see."""
    visible = length
    if spec.window is not None:
        visible = min(visible, spec.window)
    if spec.chunk is not None:
        visible = min(visible, (length - 1) % spec.chunk + 1)
    return visible
