"""Modules with collectives. Each wraps one of the model's modules, which has this rank's shard of the weights."""

from typing import Any

import torch
from torch import nn

from inflight.execution.ranks.rank import Rank


class Collective(nn.Module):
    """A module that communicates the inputs or outputs of `inner`."""

    def __init__(self, inner: nn.Module, rank: Rank) -> None:
        super().__init__()
        self.inner, self.rank = inner, rank

    @property
    def weight(self) -> Any:
        """This rank's shard; some models read it."""
        return self.inner.weight


class SummedOutputs(Collective):
    """A module whose outputs are partial sums on every rank: experts (all-reduce)."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The inputs of `inner`, to the sum of its outputs over all ranks."""
        return self.rank.sum(self.inner(*args, **kwargs))


class SummedLinear(Collective):
    """A row-parallel linear layer: every rank has some inputs (all-reduce).

    Args:
        inner: `[…, in / size]` to `[…, out]`, without a bias.
        bias: `[out]`, added to the sum.
        splits: whether the input has all features, `[…, in]`.
    """

    def __init__(self, inner: nn.Linear, rank: Rank, bias: nn.Parameter | None, *, splits: bool) -> None:
        super().__init__(inner, rank)
        self.bias, self.splits = bias, splits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in / size]` (or `[…, in]`) to `[…, out]`."""
        if self.splits:
            x = x.chunk(self.rank.size, dim=-1)[self.rank.number]
        summed = self.rank.sum(self.inner(x))
        return summed if self.bias is None else summed + self.bias


class GatheredLinear(Collective):
    """A column-parallel linear layer whose outputs are gathered (all-gather).

    Args:
        inner: `[…, in]` to the same number of outputs on each rank; together they may be more than `num_outputs`.
        num_outputs: the number of outputs.
    """

    def __init__(self, inner: nn.Linear, rank: Rank, num_outputs: int) -> None:
        super().__init__(inner, rank)
        self._num_outputs, self._is_padded = num_outputs, rank.size * inner.out_features > num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        gathered = self.rank.gather(self.inner(x))
        return gathered[..., : self._num_outputs] if self._is_padded else gathered


class SummedEmbedding(Collective):
    """A vocabulary-parallel embedding: every rank has the rows of some tokens."""

    def __init__(self, inner: nn.Embedding, rank: Rank) -> None:
        super().__init__(inner, rank)
        self._num_own = inner.weight.shape[0]
        self._first = rank.number * self._num_own

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
        own = input_ids - self._first
        is_others = (own < 0) | (own >= self._num_own)
        rows = self.inner(own.masked_fill(is_others, 0))
        return self.rank.sum(rows.masked_fill(is_others[..., None], 0))


def behind(module: Any) -> Any:
    """The model's own module: the wrapped one, or the module itself."""
    return module.inner if isinstance(module, Collective) else module
