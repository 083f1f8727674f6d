"""`Rank`: a process's rank and collectives (`kernels/exchange.h`).

Modules with collectives. Each wraps one of the model's modules, which has this rank's shard of the weights.
"""

from typing import Any

import torch
from torch import nn

from inflight.contracts.api.errors import ModelError
from inflight.execution.kernels import delete_with, kernels_available

PLACE_BYTES = 2**22
"""Bytes that a rank can exchange at a time: a row of a million float32, or a thousand rows of two thousand bfloat16."""
AN_END = "a rank has ended"
"""Part of the error message raised because another rank has ended."""


class Rank:
    """One of the ranks, in its own process. Ranks exchange rows in shared memory.

    Args:
        number: from 0, the leader.
        size: number of ranks.
        file: the descriptor of a shared in-memory file, initially empty.

    Raises:
        ModelError: our kernels are not available.
    """

    def __init__(self, number: int, size: int, file: int) -> None:
        if not kernels_available():
            raise ModelError("tensor_parallel_size needs a C++ compiler, or a wheel that has our kernels")
        self.number, self.size = number, size
        self._exchange: int = torch.ops.inflight.new_exchange(file, number, size, PLACE_BYTES)
        delete_with(self, torch.ops.inflight.delete_exchange, self._exchange)

    def begin(self, step: int) -> None:
        """Join a step; step numbers grow."""
        torch.ops.inflight.begin_exchange(self._exchange, step)

    def give_up(self) -> None:
        """Make the others abandon the step, too."""
        torch.ops.inflight.give_up_exchange(self._exchange)

    @property
    def is_given_up(self) -> bool:
        """Whether another rank has abandoned the step."""
        return bool(torch.ops.inflight.is_exchange_given_up(self._exchange))

    def end(self) -> None:
        """Make all waiting calls raise, now and later, because another rank has ended."""
        torch.ops.inflight.end_exchange(self._exchange)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """All-reduce `[…, n]` float32 or bfloat16, added in rank order in float32, so that all ranks get the same bits.
        Raises `RuntimeError` if a rank has abandoned the step, or ended."""
        summed: torch.Tensor = torch.ops.inflight.sum_of_ranks(rows, self._exchange)
        return summed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All-gather `[…, n]` float32 or bfloat16 in rank order: `[…, size * n]`. Raises as `sum` does."""
        gathered: torch.Tensor = torch.ops.inflight.gather_of_ranks(rows, self._exchange, self.size)
        return gathered


def was_told_to_end(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is the end of another rank."""
    return error is not None and (AN_END in str(error) or was_told_to_end(error.__cause__))


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
        """The inputs of `inner`, to the sum of its outputs, `[…]` float32 or bfloat16, over all ranks."""
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
        """`[…, in / size]` (or `[…, in]`) to `[…, out]`, float32 or bfloat16."""
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
        """`[…, in]` to `[…, out]`, float32 or bfloat16."""
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
