"""`Sliced`: a computation of PyTorch modules that runs in slices of time, so that steps run between them."""

import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from inflight.execution.multimodal.turns import InTurns


class Sliced:
    """Starts with the first `resume`. Pauses before a module's call if what follows, up to the next one, took longer in
    an earlier block than is left of the slice.

    Args:
        compute: the computation.
        modules: it may pause before their calls; those whose names differ in numbers alone are of one kind.
    """

    def __init__(self, compute: Callable[[], Any], modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._turns = InTurns(compute)
        self._hooks = [
            module.register_forward_pre_hook(partial(self._pause_if_over, re.sub(r"\d+", "#", name)))
            for name, module in modules
        ]
        self._deadline = 0.0
        self._seconds: dict[str, float] = {}  # from a call of each kind to the next one of any
        self._last, self._since = "", 0.0

    def resume(self, deadline: float) -> Any:
        """Run until this time (seconds of `time.monotonic()`), but at least up to the next call. Returns its result, or
        None if it has not ended. Raises its error."""
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

    def _pause_if_over(self, kind: str, *_: Any) -> None:
        if not self._turns.is_here:
            return
        now = time.monotonic()
        self._seconds[self._last] = now - self._since
        if self._turns.is_abandoned or now + self._seconds.get(kind, 0.0) >= self._deadline:
            self._turns.pause()
        self._last, self._since = kind, time.monotonic()
