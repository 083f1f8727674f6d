"""`Watchdog`: kills a hanging engine, so that its supervisor restarts it. Knows neither requests nor messages. An
engine answers between two steps, so its silence may last as long as a step, with room for steps longer than any so far.
"""

import threading
import time
from collections.abc import Callable

TIMES_LONGEST = 50
"""A step may take this many times as long as the longest so far, if that is more than the timeout."""

NUM_LOOKS = 10
"""Polls within one timeout."""


class Watchdog:
    """Watches a loaded engine, in its own thread, until `stop`.

    Args:
        ask: pings the engine; the caller calls `answered` on a reply.
        kill: ends the engine.
        timeout: seconds of silence after which it is killed, unless its steps are that long.

    Attributes:
        has_killed: seconds of silence for which the engine was killed; None: it was not.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(self, ask: Callable[[], None], kill: Callable[[], None], timeout: float) -> None:
        self.has_killed: float | None = None
        self._ask, self._kill, self._timeout = ask, kill, timeout
        self._pause = timeout / NUM_LOOKS
        self._answer = threading.Event()
        self._stopping = threading.Event()
        self._longest = 0.0
        threading.Thread(target=self._run, name="inflight: watchdog", daemon=True).start()

    def answered(self) -> None:
        """The engine has answered."""
        self._answer.set()

    def stop(self) -> None:
        """The engine is about to end, or has ended."""
        self._stopping.set()
        self._answer.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._pause):
            self._answer.clear()
            start_time = self._clock()
            self._ask()
            allowed = max(self._timeout, TIMES_LONGEST * self._longest)
            silent = 0.0
            # Not by the clock: the whole machine may have been frozen.
            while not self._answer.wait(self._pause):
                silent += self._pause
                if silent >= allowed:
                    self.has_killed = silent
                    self._kill()
                    return
            self._longest = max(self._longest, self._clock() - start_time)
