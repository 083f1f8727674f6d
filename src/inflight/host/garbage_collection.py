"""Avoids useless garbage collections: scanning the million live objects of torch and `transformers` takes a quarter to
half a second each time: at the start, at exit, and repeatedly under load.

Also finalizers that take locks: the garbage collector may run at any line, in a thread that holds the same ones.
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
    """For imports: disables the garbage collector in the block, and then moves all objects to the oldest generation."""
    was_enabled, any_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    try:
        yield
    finally:
        if not any_frozen:  # freezing and unfreezing moves objects to the oldest generation
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def freeze_loaded_objects() -> None:
    """For our own processes, after loading: excludes loaded objects from collection, and makes collections rarer. Under
    load a thousand requests are alive, with hardly any cyclic garbage."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def exit_without_garbage_collection() -> None:
    """For process exit: makes the interpreter's final collection trivial."""
    gc.freeze()


def call_after(owner: object, function: Callable[[], object]) -> None:
    """Call a function soon after an object is collected, or at process exit. It may take locks and block: a dedicated
    thread calls it, or at exit the main thread, when collections have ended."""
    weakref.finalize(owner, call_soon, function)
    _start_thread()


_handed_over: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
_is_ending = False


def call_soon(function: Callable[[], object]) -> None:
    """Call a function in a dedicated thread, or at once at process exit. Takes no lock that the calling thread could
    hold, so the garbage collector may call it."""
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
            logger.exception("a finalizer failed")
        del function  # and its references
