"""`InTurns`: a computation in a thread of its own, which only runs while another waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch


class _Abandoned(BaseException):
    """Unwinds the thread."""


class InTurns:
    """Starts with the first `resume`.

    Args:
        compute: the computation.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._num_threads = torch.get_num_threads()
        self._turn, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self.is_abandoned = False
        self._result: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name="inflight-turns", daemon=True)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to resume."""
        return self._result.done()

    @property
    def is_here(self) -> bool:
        """Whether the computation itself asks."""
        return threading.current_thread() is self._thread

    def resume(self) -> Any:
        """Run until it pauses or ends. Returns its result, or None if it has not ended. Raises its error. An interrupt
        meanwhile ends it."""
        try:
            if not self._thread.ident:
                self._thread.start()
            self._turn.release()
            self._stop.acquire()
        except BaseException:  # nothing may run beside what comes next
            self.is_abandoned = True
            self._turn.release()
            if self._thread.ident:
                self._thread.join()
            raise
        if not self.has_ended:
            return None
        self._thread.join()
        return self._result.result()

    def abandon(self) -> None:
        """End it where it paused."""
        self.is_abandoned = True
        if not self._thread.ident:
            self._result.cancel()
        elif not self.has_ended:
            with suppress(_Abandoned, Exception):  # those of the computation's own cleaning up
                self.resume()

    def pause(self) -> None:
        """Within the computation: wait for the next `resume`."""
        self._stop.release()
        self._turn.acquire()
        if self.is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        self._turn.acquire()
        torch.set_num_threads(self._num_threads)
        try:
            self._result.set_result(None if self.is_abandoned else self._compute())
        except BaseException as error:  # of the model's own code: `resume` raises it
            self._result.set_exception(error)
        finally:
            self._stop.release()
