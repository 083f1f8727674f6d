"""A process without what the garbage collector does in vain: it would go through the million objects of torch and
`transformers`, of which none is garbage, for a quarter to half a second each time: at the start, at the end, and under
load again and again.

And objects whose end takes locks: the garbage collector comes at any line, in a thread that may hold the same ones.
"""

import atexit
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

logger = logging.getLogger(__name__)

THRESHOLDS = 20_000, 20, 20
"""See `gc.set_threshold`; by default 700, 10, 10."""


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For imports: inside, the garbage collector rests, and afterwards all that is there counts as old, so that it is
    not gone through soon."""
    was_enabled, any_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    try:
        yield
    finally:
        if not any_frozen:  # there and back again is the way to the oldest generation
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def freeze_loaded_objects() -> None:
    """For a process of our own, once everything is loaded: the garbage collector never looks at it again, and comes
    less often. Under load a thousand requests are alive, and next to nothing in them is garbage that needs it."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def exit_without_garbage_collection() -> None:
    """For the end of a process: the interpreter collects once more before it ends, and now finds nothing to look at."""
    gc.freeze()


def call_after(owner: object, function: Callable[[], object]) -> None:
    """Call a function soon after an object is gone, or at the end of the process. It may take locks and wait: a thread
    that does nothing else calls it, or at the end the main thread, when nothing is collected any more."""
    weakref.finalize(owner, call_soon, function)
    _start_thread()


_handed_over: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
_is_ending = False


def call_soon(function: Callable[[], object]) -> None:
    """Call a function in a thread that does nothing else, or at once if the process is ending. Takes no lock that the
    calling thread could hold, so the garbage collector may call it."""
    _start_thread()
    if _is_ending:
        function()
    else:
        _handed_over.put(function)


@functools.cache
def _start_thread() -> None:
    thread = threading.Thread(target=_call, name="inflight: ends", daemon=True)
    thread.start()

    def end() -> None:
        global _is_ending
        _handed_over.put(None)
        thread.join()
        _is_ending = True

    atexit.register(end)  # after `finalize` has registered its own, so this is called before


def _call() -> None:
    while (function := _handed_over.get()) is not None:
        try:
            function()
        except Exception:
            logger.exception("the end of something that is gone failed")
        del function  # with what it refers to
