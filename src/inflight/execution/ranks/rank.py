"""`Rank`: one of the processes that run a model together, and how it meets the others."""

from abc import ABC, abstractmethod

import torch

AN_END = "a rank has ended"
"""What an error says, among others, to whoever waits for one that has."""


class Rank(ABC):
    """One of the ranks, in its own process.

    Args:
        number: which one; 0 leads the others.
        size: how many there are.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size

    @abstractmethod
    def begin(self, step: int) -> None:
        """Take part in a step from now on; steps have numbers that grow."""

    @abstractmethod
    def give_up(self) -> None:
        """Let the others give up the step, too, wherever they are."""

    @property
    @abstractmethod
    def is_given_up(self) -> bool:
        """Whether another rank has given up the step."""

    @property
    @abstractmethod
    def can_go_on(self) -> bool:
        """Whether there can be another step."""

    @abstractmethod
    def end(self) -> None:
        """Let whoever waits here raise, now and later, because another rank has ended."""

    @abstractmethod
    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have, `[…, n]` float32 or bfloat16, added in their order in float32: all get the
        same bits. Raises `RuntimeError` if a rank has given up the step, or ended."""

    @abstractmethod
    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """What all ranks have, `[…, n]` each, side by side in their order: `[…, size * n]`. Raises as `sum` does."""


def has_heard_of_an_end(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that another rank has ended."""
    return error is not None and (AN_END in str(error) or has_heard_of_an_end(error.__cause__))
