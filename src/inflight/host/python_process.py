"""Processes of ours that run a module and speak through their standard streams."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import BinaryIO

IDLE_THREADS_SLEEP = {"GOMP_SPINCOUNT": "10000"}
"""Environment of such a process, unless its caller sets it: torch's own threads, which compute what our kernels do not,
soon leave the cores to other processes and to our threads. (Where they sleep at once, a model that runs mostly through
torch's operators is slower by a quarter on a quiet machine.)"""


def started(module: str, files: Collection[int] = ()) -> "subprocess.Popen[bytes]":
    """Start `python -m module`, which finds modules where this process does and inherits these files.

    It has a session of its own, so that an interrupt from the terminal does not end it. No other process has the write
    end of its standard input, so that ends as soon as this process does.
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
    """How a process ended, such as "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
