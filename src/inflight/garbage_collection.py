"""A process without what the garbage collector does in vain: it would go through the million objects of torch and
`transformers`, of which none is garbage, for a quarter to half a second each time: at the start, at the end, and under
load again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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


def spare_what_stays() -> None:
    """For a process of our own, once everything is loaded: the garbage collector never looks at it again, and comes
    less often. Under load a thousand requests are alive, and next to nothing in them is garbage that needs it."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def end_without_garbage_collection() -> None:
    """For the end of a process: the interpreter collects once more before it ends, and now finds nothing to look at."""
    gc.freeze()
