"""`Sliced`: a computation of PyTorch modules that runs in slices of time, so that steps run between them."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from inflight.execution.multimodal.turns import InTurns


class Sliced:
    """Starts with the first `resume`, and pauses before the next module's call when a slice is over.

    Args:
        compute: the computation.
        modules: it may pause before their calls.
    """

    def __init__(self, compute: Callable[[], Any], modules: Iterable[nn.Module]) -> None:
        self._turns = InTurns(compute)
        self._hooks = [module.register_forward_pre_hook(self._pause_if_over) for module in modules]
        self._deadline = 0.0

    def resume(self, deadline: float) -> Any:
        """Run until about this time (seconds of `time.monotonic()`). Returns its result, or None if it has not ended.
        Raises its error."""
        self._deadline = deadline
        try:
            return self._turns.resume()
        finally:
            if self._turns.has_ended:
                self._unhook()

    def abandon(self) -> None:
        """End it where it paused."""
        self._turns.abandon()
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _pause_if_over(self, *_: Any) -> None:
        if self._turns.is_here and (self._turns.is_abandoned or time.monotonic() >= self._deadline):
            self._turns.pause()
