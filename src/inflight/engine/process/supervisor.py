"""`Supervisor`: restarts an engine after a crash, and gives it up after too many. Knows no request."""

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
"""Seconds before each restart, by crashes in a row. After one more crash the engine is given up."""


class Supervisor:
    """Keeps one engine running, started on first use.

    Args:
        connect: starts an engine.
        step_timeout: seconds of silence after which an engine is killed (see `Watchdog`); None: never.
        restart_delays: seconds before each restart, for each tolerated crash in a row. A finished request resets the
            count.
        name: of the engine, for logs and errors.

    Attributes:
        num_crashes: number of crashes.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        restart_delays: Sequence[float] = RESTART_DELAYS,
        step_timeout: float | None = None,
        name: str = "the engine",
    ) -> None:
        self.num_crashes = 0
        self._name = name
        self._connect = connect
        self._restart_delays = restart_delays
        self._step_timeout = step_timeout
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._next: Session | None = None  # which replaces it when it is loaded
        self._num_in_a_row = 0
        self._last_crash: tuple[float, Exception] = (0.0, EngineDeadError())

    def start(self) -> "Future[Session]":
        """The running or starting engine; starts one if there is none.

        Raises `EngineGivenUpError` if it has died too often in a row."""
        with self._lock:
            if self._session is None and self._next is not None:
                return self._next.started
            if self._session is None:
                self._session = self._new_session(self._delay())
            return self._session.started

    @property
    def running(self) -> Session | None:
        """The engine, if loaded and not retired."""
        session = self._session
        return session if session is not None and session.is_ready else None

    def replace(self) -> "Future[Session | None]":
        """Start a replacement. Once it is loaded it takes the requests, the old engine ends with its last one, and this
        returns the old one. If loading fails, this raises the error, and the old engine stays."""
        replaced: Future[Session | None] = Future()
        replaced.set_running_or_notify_cancel()
        with self._lock:
            new = self._next = self._new_session(0.0)

        def loaded(started: "Future[Session]") -> None:
            with self._lock:
                self._next = None
                error = started.exception()
                old = None
                if error is None and not new.is_stopped:
                    old, self._session = self._session, new
            if error is not None:
                replaced.set_exception(error)
                return
            if old is not None:
                old.retire()
            replaced.set_result(old)

        new.started.add_done_callback(loaded)
        return replaced

    def stop(self) -> Session | None:
        """Tell the engine to end, and return its session at once, for joining. Resets the crash count."""
        with self._lock:
            session, self._session = self._session, None
            self._num_in_a_row = 0
            replacement = self._next
        for each in (session, replacement):
            if each is not None:
                each.stop()
        return session

    def _new_session(self, delay: float) -> Session:
        return Session(self._connect, delay, self._ended, self._step_timeout, self._name)

    def _delay(self) -> float:
        if self._num_in_a_row == 0:
            return 0.0
        crash_time, error = self._last_crash
        if self._num_in_a_row > len(self._restart_delays):
            raise EngineGivenUpError(
                f"{self._name} has died {self._num_in_a_row} times in a row; the last time, {error}"
            )
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
            logger.error("%s: %d times in a row; giving up", error, self._num_in_a_row)
        else:
            delay = self._restart_delays[self._num_in_a_row - 1]
            logger.error("%s; it can be started again in %g s", error, delay)
