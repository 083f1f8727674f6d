"""The process of a rank on rank 0's machine. It ends with rank 0."""

import os
import sys
import threading

from inflight.engine.ranks.links import LoadShard, StreamLink
from inflight.host.garbage_collection import exit_without_garbage_collection, garbage_collection_paused
from inflight.host.python_process import take_over_standard_streams


def main() -> int:
    link = StreamLink(*take_over_standard_streams())
    with garbage_collection_paused():  # slow; the model to load may not be known yet
        from inflight.engine.ranks.following import follow
    part = link.receive()
    if not isinstance(part, LoadShard):
        return 0
    place = part.place
    os.sched_setaffinity(0, place.cpus)  # before threads compute: they inherit the CPU mask
    threading.Thread(target=_end_with, args=(place.lifeline,), daemon=True).start()
    try:
        return 0 if follow(part, link) else 1
    finally:
        exit_without_garbage_collection()


def _end_with(lifeline: int) -> None:
    """Exit this process when rank 0 ends."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
