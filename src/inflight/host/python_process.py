"""Python child processes that communicate through their standard streams.

Framing of messages on a pipe: the payload's length (4 bytes, little-endian), then the payload.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import IO, BinaryIO

LENGTH_BYTES = 4


def framed(payload: bytes) -> bytes:
    """A message as a frame."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream, even if it comes in the middle of a frame."""
    header = stream.read(LENGTH_BYTES)
    length = int.from_bytes(header, "little")
    payload = stream.read(length)
    return payload if len(header) == LENGTH_BYTES and len(payload) == length else None


IDLE_THREADS_SLEEP = {"GOMP_SPINCOUNT": "10000"}
"""The default environment: torch's own threads, which run other operators than our kernels, stop spinning soon. (If
they sleep at once, a model that runs mostly torch's operators is a quarter slower on an idle machine.)"""


def started(module: str, files: Collection[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `python -m module`, with this process's module path, inheriting these files.

    It has its own session, so that an interrupt from the terminal does not end it. No other process has the write end
    of its standard input, which thus ends with this process.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=IDLE_THREADS_SLEEP | os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        start_new_session=True,
        pass_fds=tuple(files),
    )


def take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep standard input and output for the caller; all other code reads nothing and writes to standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def ending(code: int) -> str:
    """A description of a process's exit, such as "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
