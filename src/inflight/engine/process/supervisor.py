"""`Supervisor`: decides when an engine that has died is started again, and when it is given up. Knows no request."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from inflight.contracts.errors import EngineDeadError, EngineGivenUpError
from inflight.engine.process.connection import Connection
from inflight.engine.process.session import Session

logger = logging.getLogger("inflight.engine")

RESTART_DELAYS = (0.5, 1.0)
"""Seconds between a crash and the next start, for each crash in a row. After one more crash the engine is given up."""


class Supervisor:
    """Keeps at most one engine running, which starts when it is first asked for.

    Args:
        connect: starts an engine.
        step_timeout: seconds of silence after which an engine is killed (see `Watchdog`); None: never.
        restart_delays: seconds between a crash and the next start, for each crash in a row that is tolerated. Once a
            request has run to its end, counting begins again.

    Attributes:
        num_crashes: how many engines have died.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        restart_delays: Sequence[float] = RESTART_DELAYS,
        step_timeout: float | None = None,
    ) -> None:
        self.num_crashes = 0
        self._connect = connect
        self._restart_delays = restart_delays
        self._step_timeout = step_timeout
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._num_in_a_row = 0
        self._last_crash: tuple[float, Exception] = (0.0, EngineDeadError())

    def start(self) -> "Future[Session]":
        """The engine that runs, or that is being started, or that starts now.

        Raises `EngineGivenUpError` if it has died too often in a row."""
        with self._lock:
            if self._session is None:
                self._session = Session(self._connect, self._delay(), self._ended, self._step_timeout)
            return self._session.started

    def stop(self) -> Session | None:
        """Tell the engine to end, and return its session at once, to be joined. The next start counts as the first."""
        with self._lock:
            session, self._session = self._session, None
            self._num_in_a_row = 0
        if session is not None:
            session.stop()
        return session

    def _delay(self) -> float:
        if self._num_in_a_row == 0:
            return 0.0
        crash_time, error = self._last_crash
        if self._num_in_a_row > len(self._restart_delays):
            raise EngineGivenUpError(f"the engine has died {self._num_in_a_row} times in a row; the last time, {error}")
        return max(0.0, crash_time + self._restart_delays[self._num_in_a_row - 1] - time.monotonic())

    def _ended(self, session: Session, error: Exception) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
            if isinstance(error, EngineDeadError) and not session.is_stopped:
                self.num_crashes += 1
                self._num_in_a_row = 1 if session.has_served else self._num_in_a_row + 1
                self._last_crash = (time.monotonic(), error)
                self._log_crash(error)

    def _log_crash(self, error: Exception) -> None:
        if self._num_in_a_row > len(self._restart_delays):
            logger.error("%s: %d times in a row, so it is given up", error, self._num_in_a_row)
        else:
            delay = self._restart_delays[self._num_in_a_row - 1]
            logger.error("%s; it can be started again in %g s", error, delay)
