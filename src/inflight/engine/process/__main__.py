"""The engine's process: commands arrive on standard input, events leave on standard output.

It ends when its standard input does, because the caller closed it or died; with prefixes or records to save, it may
first finish its step and save them. Anything printed here goes to standard error.
"""

import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import BinaryIO

from inflight.engine.process.protocol import Commands, Event, read_command, read_load, to_frame
from inflight.engine.ranks.group import start_early
from inflight.host.garbage_collection import (
    exit_without_garbage_collection,
    freeze_loaded_objects,
    garbage_collection_paused,
)
from inflight.host.lean_imports import import_leanly
from inflight.host.python_process import take_over_standard_streams

SECONDS_TO_SAVE = 4.5
"""After that, callers kill it (`connection.SECONDS_TO_END`)."""

SWITCH_INTERVAL = 0.0001
"""The interpreter's switch interval, in seconds. A step releases the GIL at each of its hundred operators, and waits as
long each time for a thread that reads or compiles requests."""


def main() -> int:
    import_leanly()
    sys.setswitchinterval(SWITCH_INTERVAL)
    incoming, outgoing = take_over_standard_streams()
    asked = read_load(incoming)
    if asked is None:
        return 0
    if asked.cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked.cpus)  # before any thread is made: threads inherit the CPU mask
    commands: Commands = SimpleQueue()
    saves = asked.config.prefix_cache.folder is not None or asked.watching.record_to is not None
    seconds_to_save = SECONDS_TO_SAVE if saves else None
    threading.Thread(target=_listen, args=(incoming, commands, seconds_to_save), daemon=True).start()

    with garbage_collection_paused():  # slow; meanwhile the thread notices if the caller dies
        if asked.config.tensor_parallel_size > 1:
            start_early(asked.config.tensor_parallel_size)
        from inflight.engine.engine import Engine
        from inflight.engine.process.loop import serve
        from inflight.execution.mapped_memory import share_through
        from inflight.text.tokenizer_files import load_tokenizer

    def load() -> Engine:
        if asked.weights_file is not None:
            share_through(asked.weights_file)
        engine = Engine(asked.model, asked.config, load_tokenizer(asked.model, asked.tokenizer, asked.config))
        freeze_loaded_objects()
        return engine

    def send(event: Event) -> None:
        try:
            outgoing.write(to_frame(event))
            outgoing.flush()
        except BrokenPipeError:
            os._exit(0)

    try:
        return 0 if serve(load, commands, send, asked.watching) else 1
    finally:
        exit_without_garbage_collection()


def _listen(incoming: BinaryIO, commands: Commands, seconds_to_save: float | None) -> None:
    try:
        while (command := read_command(incoming)) is not None:
            commands.put(command)
        if seconds_to_save is not None:
            commands.put(None)
            time.sleep(seconds_to_save)  # unless the process ends first, as it should
    finally:
        os._exit(0)  # the engine may be in any state, and no caller is left


if __name__ == "__main__":
    sys.exit(main())
