"""The process that an engine runs in: commands come in on standard input, events go out on standard output.

It ends when standard input does, that is when the caller closes it or dies, whatever the engine is doing then. What
anybody prints here goes to standard error.
"""

import os
import sys
import threading
from queue import SimpleQueue
from typing import BinaryIO

from inflight.engine.process.protocol import Commands, Event, read_command, read_load, to_frame


def main() -> int:
    incoming, outgoing = _take_over_standard_streams()
    asked = read_load(incoming)
    if asked is None:
        return 0
    commands: Commands = SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, commands), daemon=True).start()

    from inflight.engine.engine import Engine  # after the thread, which hears the caller die while this loads
    from inflight.engine.process.loop import serve
    from inflight.inputs import load_tokenizer

    def load() -> Engine:
        return Engine(asked.model, asked.config, load_tokenizer(asked.model, asked.tokenizer, asked.config))

    def send(event: Event) -> None:
        try:
            outgoing.write(to_frame(event))
            outgoing.flush()
        except BrokenPipeError:
            os._exit(0)

    return 0 if serve(load, commands, send) else 1


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output for this module alone; all others read nothing, and write to standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _listen(incoming: BinaryIO, commands: Commands) -> None:
    try:
        while (command := read_command(incoming)) is not None:
            commands.put(command)
    finally:
        os._exit(0)  # the engine may be in the middle of anything, and nobody wants it any more


if __name__ == "__main__":
    sys.exit(main())
