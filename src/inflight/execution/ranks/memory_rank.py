"""`MemoryRank`: a rank that meets the others in memory that they share (`kernels/exchange.h`)."""

import torch

from inflight.contracts.errors import ModelError
from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.ranks.rank import Rank

PLACE_BYTES = 2**22
"""What a rank may show to the others at a time: a row of a million float32, or a thousand rows of two thousand
bfloat16."""


class MemoryRank(Rank):
    """One of the ranks on a machine.

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
        super().__init__(number, size)
        self._exchange: int = torch.ops.inflight.new_exchange(file, number, size, PLACE_BYTES)
        delete_with(self, torch.ops.inflight.delete_exchange, self._exchange)

    def begin(self, step: int) -> None:
        torch.ops.inflight.begin_exchange(self._exchange, step)

    def give_up(self) -> None:
        torch.ops.inflight.give_up_exchange(self._exchange)

    @property
    def is_given_up(self) -> bool:
        return bool(torch.ops.inflight.is_exchange_given_up(self._exchange))

    @property
    def can_go_on(self) -> bool:
        return True

    def end(self) -> None:
        torch.ops.inflight.end_exchange(self._exchange)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.ops.inflight.sum_of_ranks(rows, self._exchange)
        return summed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = torch.ops.inflight.gather_of_ranks(rows, self._exchange, self.size)
        return gathered
