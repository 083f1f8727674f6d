"""`off_loop`: work that grows with the size of a request runs beside the event loop, so that it holds up no other.

Decides what is small enough to run at once, and what waits: the smallest goes first. A client that leaves takes its
waiting work with it. Does not know what the work is, except that no single call in it may keep the interpreter's lock
for long; Python code gives it up by itself.
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
"""Work on a request of at most this many bytes takes about a millisecond, and is not worth a thread."""

NUM_THREADS = 2
"""They mostly share one interpreter lock; the second keeps a long piece of work from holding up all others."""

T = TypeVar("T")


class Workers:
    """Threads that do work beside an event loop; they start with the first of it."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._waiting: PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._numbers = count()  # of two that are equally large the first goes first
        self._lock = threading.Lock()
        self._has_started = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises. If this is cancelled, work that waits never starts.

        Args:
            size: about how many bytes the work goes through.
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
"""Runs work beside the event loop of the server; see `Workers.run`."""
