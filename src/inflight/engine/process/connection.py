"""`Connection`: starts an engine's loop, in its own process or in a thread, and carries messages to and from it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from inflight.contracts.api.watching import Watching
from inflight.engine.process.protocol import Command, Commands, Event, Load, read_event, to_frame
from inflight.host.python_process import ending, started

if TYPE_CHECKING:
    from inflight.engine.engine import Engine

SECONDS_TO_END = 5.0
"""Seconds that an engine may take to end before it is killed."""


class Connection(Protocol):
    """One engine loop. Any thread may `send` and `close`; one thread listens."""

    def send(self, command: Command) -> None:
        """Queue a command and return at once. Does nothing if the engine has ended."""

    def listen(self, take: Callable[[Event], None]) -> None:
        """Call a function with each event, until the engine has ended."""

    def close(self) -> None:
        """Tell the engine to end, and return at once."""

    def kill(self) -> None:
        """Kill the engine, if possible."""

    def ending(self) -> str:
        """The process's exit, such as "was killed by SIGKILL". Call it after the last event."""


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

    def listen(self, take: Callable[[Event], None]) -> None:
        assert self._process.stdout is not None
        while (event := read_event(self._process.stdout)) is not None:
            take(event)

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
    """A connection to an engine in this process: the listening thread runs it.

    Args:
        load: makes the engine, in that thread.
        is_offline: see `serve`.

    Attributes:
        engine: once it is made.
        thread: the one that runs it.
    """

    engine: Engine
    thread: threading.Thread

    def __init__(
        self, load: Callable[[], Engine], watching: Watching | None = None, *, is_offline: bool = False
    ) -> None:
        self._load, self._watching, self._is_offline = load, watching, is_offline
        self._commands: Commands = SimpleQueue()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def listen(self, take: Callable[[Event], None]) -> None:
        from inflight.engine.process.loop import serve  # with torch

        def loaded() -> Engine:
            self.engine = self._load()
            return self.engine

        self.thread = threading.current_thread()
        try:
            serve(loaded, self._commands, take, self._watching, is_offline=self._is_offline)
        finally:
            vars(self).pop("engine", None)

    def close(self) -> None:
        self._commands.put(None)

    def kill(self) -> None:
        """A thread cannot be killed."""

    def ending(self) -> str:
        return "broke"
