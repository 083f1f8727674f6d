"""`Connection`: starts an engine's loop, in a process of its own or in a thread of this one, and carries messages to
and from it without looking into them."""

from __future__ import annotations

import atexit
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from inflight.contracts.watching import Watching
from inflight.engine.process.protocol import Command, Commands, Event, Load, read_event, to_frame
from inflight.engine.python_process import ending, started

if TYPE_CHECKING:
    from inflight.engine.engine import Engine
    from inflight.engine.pooling import PoolingEngine

SECONDS_TO_END = 5.0
"""How long an engine that was told to end may take before it is killed."""


class Connection(Protocol):
    """One engine loop. Any thread may `send` and `close`; one thread receives."""

    def send(self, command: Command) -> None:
        """Queue a command, and return at once, whatever the engine is doing. Does nothing if the engine has ended."""

    def receive(self) -> Event | None:
        """Wait for the next event; None: the engine has ended, and no event will follow."""

    def close(self) -> None:
        """Tell the engine to end, and return at once, without waiting for it."""

    def kill(self) -> None:
        """End an engine that does not answer, if that is possible."""

    def ending(self) -> str:
        """How it ended, such as "was killed by SIGKILL". Call it after the last event."""


class ProcessConnection:
    """A connection to `python -m inflight.engine.process`."""

    def __init__(self, load: Load) -> None:
        self._process = started("inflight.engine.process", [] if load.weights_file is None else [load.weights_file])
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._frames.put(to_frame(load))
        threading.Thread(target=self._write, name="inflight: to the engine", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
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
        return ending(code)

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError):  # the engine has ended, which the receiver notices
            while (frame := self._frames.get()) is not None:
                stdin.write(frame)
                stdin.flush()
        with suppress(OSError):
            stdin.close()


class ThreadConnection:
    """A connection to a thread of this process: for models that are loaded already, which no other process can have."""

    def __init__(self, load: Callable[[], Engine | PoolingEngine], watching: Watching | None = None) -> None:
        self._commands: Commands = SimpleQueue()
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(load, watching), name="inflight: engine", daemon=True)
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

    def _run(self, load: Callable[[], Engine | PoolingEngine], watching: Watching | None) -> None:
        from inflight.engine.process.loop import serve  # with torch

        try:
            serve(load, self._commands, self._events.put, watching)
        finally:
            self._events.put(None)

    def _end(self) -> None:
        self.close()
        self._thread.join(SECONDS_TO_END)
