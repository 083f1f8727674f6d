"""`Connection`: to an engine's loop, which it starts. Two kinds: to a process of its own, to a thread of this one.

Carries messages; does not look into them.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from inflight.engine.engine import Engine
from inflight.engine.process.loop import serve
from inflight.engine.process.protocol import Command, Commands, Event, Load, read_event, to_frame

IDLE_THREADS_SLEEP = {"GOMP_SPINCOUNT": "10000"}
"""Of the engine's process, where its caller has not said otherwise: threads that wait for each other soon leave the
cores to those that the engine shares them with, its own callers first of all. (Sleeping at once costs a quarter of the
speed of an engine that is alone, spinning for ever several times that of one that is not.)"""
SECONDS_TO_END = 5.0
"""An engine that was told to end has so long before it is killed."""


class Connection(Protocol):
    """One engine loop. Any thread may `send` and `close`; one thread receives."""

    def send(self, command: Command) -> None:
        """Queue a command; returns at once, whatever the engine is doing. An engine that has ended does not mind."""

    def receive(self) -> Event | None:
        """Wait for the next event; None: the engine has ended, and no more will come."""

    def close(self) -> None:
        """Tell the engine to end; returns at once. What it is still doing is not waited for."""

    def kill(self) -> None:
        """End an engine that does not listen, if that is possible."""

    def ending(self) -> str:
        """How it ended, such as "was killed by SIGKILL"; to be asked after the last event."""


class ProcessConnection:
    """To `python -m inflight.engine.process`, which finds modules where this process does.

    It is in a session of its own: what a terminal sends to interrupt this process does not end the engine. The write
    end of its standard input is in no other process's hands, so it is at its end as soon as this process is.
    """

    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inflight.engine.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=IDLE_THREADS_SLEEP | os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            start_new_session=True,
        )
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._frames.put(to_frame(load))
        threading.Thread(target=self._write, name="inflight: to the engine", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def send(self, command: Command) -> None:
        self._frames.put(to_frame(command))

    def receive(self) -> Event | None:
        assert self._process.stdout is not None
        return read_event(self._process.stdout)

    def close(self) -> None:
        self._frames.put(None)

    def kill(self) -> None:
        self._process.kill()

    def ending(self) -> str:
        assert self._process.stdout is not None
        self._frames.put(None)
        self._process.stdout.close()
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError):  # it has ended: that is for the receiver to notice
            while (frame := self._frames.get()) is not None:
                stdin.write(frame)
                stdin.flush()
        with suppress(OSError):
            stdin.close()


class ThreadConnection:
    """To a thread of this process: for what cannot be named to another one, such as a model that is loaded already."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._commands: Commands = SimpleQueue()
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(load,), name="inflight: engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # a thread in the middle of a step would crash the interpreter's end

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self) -> Event | None:
        return self._events.get()

    def close(self) -> None:
        self._commands.put(None)

    def kill(self) -> None:
        """A thread cannot be killed."""

    def ending(self) -> str:
        atexit.unregister(self._end)
        self._thread.join()
        return "broke"

    def _run(self, load: Callable[[], Engine]) -> None:
        try:
            serve(load, self._commands, self._events.put)
        finally:
            self._events.put(None)

    def _end(self) -> None:
        self.close()
        self._thread.join(SECONDS_TO_END)
