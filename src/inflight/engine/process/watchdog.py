"""`Watchdog`: kills an engine that hangs, so that the next one can be started. Knows neither requests nor messages.

Decides how long an engine may be silent. It answers between two steps, so silence lasts as long as a step, and longer
steps than those so far must have room.
"""

import threading
import time
from collections.abc import Callable

TIMES_LONGEST = 50
"""A step may take this many times as long as the longest so far, if that is more than the timeout."""

NUM_LOOKS = 10
"""How often within the timeout an engine is asked, and a silent one is looked at."""


class Watchdog:
    """Watches one engine that has been loaded, in a thread of its own, until `stop`.

    Args:
        ask: asks the engine for a sign of life; `answered` is to be called when that comes.
        kill: ends the engine.
        timeout: seconds of silence after which it is killed, unless its steps take that long.

    Attributes:
        has_killed: how long the engine was silent, in seconds, if it was killed for that.
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
            # Not by the clock: a whole machine may have been frozen, and the engine with it.
            while not self._answer.wait(self._pause):
                silent += self._pause
                if silent >= allowed:
                    self.has_killed = silent
                    self._kill()
                    return
            self._longest = max(self._longest, self._clock() - start_time)
