"""How many threads compute a step. Its bits do not depend on that."""

import torch

from inflight.execution.kernels import kernels_available
from inflight.machine import usable_cores


class ComputeThreads:
    """The threads of steps.

    Args:
        number: how many; None: as many as torch has, but no more than `usable_cores()`.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number or min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self.number)

    def prepare(self, *, are_own: bool) -> None:
        """For what the calling thread does next.

        Args:
            are_own: whether our operators run on threads of ours, and torch's in a recording on the calling one alone
                (`kernels/threads.h`).
        """
        if torch.get_num_threads() != self.number:  # torch has one for each thread that calls it
            torch.set_num_threads(self.number)
        if kernels_available():
            torch.ops.inflight.use_own_threads(are_own)
