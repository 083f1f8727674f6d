"""`Rank`: a process's rank and collectives (`kernels/exchange.h`)."""

import torch

from inflight.contracts.errors import ModelError
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
        """All-gather `[…, n]` in rank order: `[…, size * n]`. Raises as `sum` does."""
        gathered: torch.Tensor = torch.ops.inflight.gather_of_ranks(rows, self._exchange, self.size)
        return gathered


def was_told_to_end(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is the end of another rank."""
    return error is not None and (AN_END in str(error) or was_told_to_end(error.__cause__))
