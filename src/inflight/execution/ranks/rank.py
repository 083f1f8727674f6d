"""`Rank`: one of the processes that run a model together, and how it meets the others (`kernels/exchange.h`)."""

import torch

from inflight.contracts.errors import ModelError
from inflight.execution.kernels import delete_with, kernels_available

PLACE_BYTES = 2**22
"""What a rank may show to the others at a time: a row of a million float32, or a thousand rows of two thousand
bfloat16."""
AN_END = "a rank has ended"
"""Part of the message of an error that a rank raises because another one has ended."""


class Rank:
    """One of the ranks, in its own process. Ranks exchange rows in memory that they share.

    Args:
        number: which one; 0 leads the others.
        size: how many there are.
        file: the descriptor of a file in memory, empty at first, that all of them have.

    Raises:
        ModelError: there are no kernels of ours here.
    """

    def __init__(self, number: int, size: int, file: int) -> None:
        if not kernels_available():
            raise ModelError("tensor_parallel_size needs a C++ compiler, or a wheel that has our kernels")
        self.number, self.size = number, size
        self._exchange: int = torch.ops.inflight.new_exchange(file, number, size, PLACE_BYTES)
        delete_with(self, torch.ops.inflight.delete_exchange, self._exchange)

    def begin(self, step: int) -> None:
        """Take part in a step from now on; steps have numbers that grow."""
        torch.ops.inflight.begin_exchange(self._exchange, step)

    def give_up(self) -> None:
        """Let the others give up the step, too, wherever they are."""
        torch.ops.inflight.give_up_exchange(self._exchange)

    @property
    def is_given_up(self) -> bool:
        """Whether another rank has given up the step."""
        return bool(torch.ops.inflight.is_exchange_given_up(self._exchange))

    def end(self) -> None:
        """Let every call that waits here raise, now and later, because another rank has ended."""
        torch.ops.inflight.end_exchange(self._exchange)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have, `[…, n]` float32 or bfloat16, added in their order in float32: all get the
        same bits. Raises `RuntimeError` if a rank has given up the step, or ended."""
        summed: torch.Tensor = torch.ops.inflight.sum_of_ranks(rows, self._exchange)
        return summed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """What all ranks have, `[…, n]` each, side by side in their order: `[…, size * n]`. Raises as `sum` does."""
        gathered: torch.Tensor = torch.ops.inflight.gather_of_ranks(rows, self._exchange, self.size)
        return gathered


def was_told_to_end(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that another rank has ended."""
    return error is not None and (AN_END in str(error) or was_told_to_end(error.__cause__))
