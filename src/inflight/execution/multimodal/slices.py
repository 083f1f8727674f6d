"""`Sliced`: a computation of PyTorch modules that runs in slices of time, so that steps run between them.

It runs in its own thread, which pauses before the next module's call when a slice is over. Only one of the two threads
runs at any time.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn


class _Abandoned(BaseException):
    """Unwinds the thread."""


class Sliced:
    """Starts with the first `resume`.

    Args:
        compute: the computation.
        modules: it may pause before their calls.
    """

    def __init__(self, compute: Callable[[], Any], modules: Iterable[nn.Module]) -> None:
        self._compute = compute
        self._num_threads = torch.get_num_threads()
        self._hooks = [module.register_forward_pre_hook(self._pause_if_over) for module in modules]
        self._turn, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._deadline: float | None = 0.0  # None: it is abandoned
        self._result: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name="inflight-encoder", daemon=True)
        self._thread.start()

    def resume(self, deadline: float) -> Any:
        """Run until about this time (seconds of `time.monotonic()`). Returns its result, or None if it has not ended.
        Raises its error."""
        self._go(deadline)
        return self._result.result() if self._result.done() else None

    def abandon(self) -> None:
        """End it where it paused."""
        if self._thread.is_alive():
            self._go(None)

    def _go(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._turn.release()
        self._stop.acquire()
        if self._result.done():
            self._thread.join()
            for hook in self._hooks:
                hook.remove()

    def _run(self) -> None:
        self._turn.acquire()
        torch.set_num_threads(self._num_threads)
        try:
            self._result.set_result(None if self._deadline is None else self._compute())
        except BaseException as error:  # of the model's own code: `resume` raises it
            self._result.set_exception(error)
        finally:
            self._stop.release()

    def _pause_if_over(self, *_: Any) -> None:
        if threading.current_thread() is not self._thread:
            return
        if self._deadline is not None and time.monotonic() < self._deadline:
            return
        self._stop.release()
        self._turn.acquire()
        if self._deadline is None:
            raise _Abandoned
