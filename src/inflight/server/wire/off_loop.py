"""`off_loop`: runs work that grows with the size of a request in threads, so that it does not block the event loop.

Small work runs at once; other work waits, the smallest first, and is dropped if its client disconnects. No single call
in it may hold the GIL for long; Python code releases it periodically.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

SMALL = 4096
"""Work on at most this many bytes takes about a millisecond, and runs at once."""

NUM_THREADS = 2
"""Threads mostly share the GIL; the second keeps long work from blocking all others."""

T = TypeVar("T")


class Workers:
    """Worker threads for an event loop, started on first use."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._waiting: PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._numbers = count()  # of two that are equally large the first goes first
        self._lock = threading.Lock()
        self._has_started = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` and return its result. If cancelled, waiting work never starts.

        Args:
            size: estimated bytes to process.
        """
        if size <= SMALL:
            return work()
        self._start()
        future: Future[T] = Future()
        context = copy_context()
        self._waiting.put((size, next(self._numbers), future, lambda: context.run(work)))
        return await asyncio.wrap_future(future)

    def _start(self) -> None:
        with self._lock:
            if self._has_started:
                return
            self._has_started = True
        for _ in range(self._num_threads):
            threading.Thread(target=self._work, name="inflight: large requests", daemon=True).start()

    def _work(self) -> None:
        while True:
            _, _, future, work = self._waiting.get()
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del future, work  # the next may be long in coming


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # the waiting task must learn of it
        future.set_exception(error)
    else:
        future.set_result(result)


off_loop = Workers().run
"""Runs work outside the server's event loop; see `Workers.run`."""
