"""A start and an end without the garbage collector: it would go through the million objects of torch and
`transformers`, of which none is garbage, for half a second each time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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


def end_without_garbage_collection() -> None:
    """For the end of a process: the interpreter collects once more before it ends, and now finds nothing to look at."""
    gc.freeze()
