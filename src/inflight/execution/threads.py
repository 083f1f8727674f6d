"""The compute threads of a step. Their number changes no bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from inflight.execution.kernels import kernels_available
from inflight.host.machine import usable_cores

_of_steps: ContextVar[int | None] = ContextVar("threads of steps, where torch has one", default=None)


class ComputeThreads:
    """The compute threads.

    Args:
        number: how many; None: as many as torch has, but no more than `usable_cores()`.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number or min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self.number)

    def prepare(self, *, are_own: bool) -> None:
        """Set the calling thread's compute threads.

        Args:
            are_own: whether our operators run on our threads, and torch's in a graph on the calling thread alone
                (`kernels/threads.h`).
        """
        if torch.get_num_threads() != self.number:  # torch has one for each thread that calls it
            torch.set_num_threads(self.number)
        _use_own(self.number if are_own else 0)


def num_threads() -> int:
    """The number of threads of a step in this context."""
    return _of_steps.get() or torch.get_num_threads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """A context in which torch's operators run on the calling thread alone, and ours on our threads. In a short forward
    pass torch's threads wait for each other longer than they work, much longer if other processes use the cores."""
    number = torch.get_num_threads()
    token = _of_steps.set(number)
    torch.set_num_threads(1)
    _use_own(number)
    try:
        yield
    finally:
        torch.set_num_threads(number)
        _use_own(0)
        _of_steps.reset(token)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """A context in which all operators run on this number of torch's threads."""
    before, own = torch.get_num_threads(), _of_steps.get()
    torch.set_num_threads(number)
    _use_own(0)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _use_own(own or 0)


def _use_own(number: int) -> None:
    if kernels_available():
        torch.ops.inflight.use_own_threads(number)
