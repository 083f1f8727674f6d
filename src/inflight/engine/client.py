"""`EngineClient`: how fronts reach the engines of one model. Knows no prompt and no text.

`OneEngine` starts an engine, restarts it when it has died, and puts a new one in its place. Several are a `Fleet`
(`engine.fleet`), which chooses one for each request.
"""

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import WeakSet

from inflight.contracts.api.config import RESTART_DELAYS
from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError
from inflight.contracts.api.watching import Watching
from inflight.contracts.step.block_hash import Root
from inflight.engine.process.connection import Connection, ThreadConnection
from inflight.engine.process.protocol import CloseAdapter, OpenAdapter
from inflight.engine.process.session import Mail, Mailbox, Session, shared_future

if TYPE_CHECKING:
    from inflight.engine.engine import Engine

logger = logging.getLogger("inflight.engine")

_in_threads: "WeakSet[EngineClient]" = WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread inside a step would crash the interpreter at exit."""
    for client in list(_in_threads):
        client.close()


class EngineClient(ABC):
    """One engine or several. Any thread may call its methods.

    Attributes:
        num_replicas: how many engines there are, running or not.
        num_crashes: how many engines have died.
    """

    num_replicas: int
    num_crashes: int

    @abstractmethod
    def start(self) -> "Future[Session]":
        """Start all engines that do not run. Returns the first one loaded, as soon as it is.

        Raises `EngineGivenUpError` if each has died too often in a row."""

    @abstractmethod
    def stop(self) -> list[Session]:
        """Tell all engines to end, and return their sessions at once, to be joined. The next start counts as the
        first."""

    @abstractmethod
    def sessions(self) -> dict[int, Session]:
        """The engines that are loaded and take requests, by the numbers of their replicas."""

    @abstractmethod
    def num_crashes_of(self, number: int) -> int:
        """How many engines of one replica have died."""

    @abstractmethod
    def replace(self) -> "Iterator[Future[Session | None]]":
        """Put a new engine in the place of each, one after another: each of these futures is done when the new one is
        loaded and gets the requests, with the old one, which ends when its last request has; take the next one then.
        If a new one cannot be loaded, the future has its error, and the old one stays."""

    @abstractmethod
    def deliver(
        self,
        token_ids: Sequence[int],
        root: Root,
        num_sequences: int = 1,
        take: Callable[[Mail], None] | None = None,
        *,
        in_background: bool = False,
    ) -> AbstractContextManager[Mailbox]:
        """Choose an engine for a request, which runs there until the block ends. Raises `EngineDeadError`.

        Args:
            root: what else must be equal for two prompts to share a prefix.
            take: see `Mailbox`.
        """

    def close(self) -> None:
        """End all engines, and wait until they have ended."""
        for session in self.stop():
            session.join()

    def open_adapter(self, source: str) -> "list[Future[object]]":
        """Let all engines load an adapter. The futures raise `AdapterError`, `EngineDeadError`."""
        return [each.ask(lambda address: OpenAdapter(address, source)) for each in self.sessions().values()]

    def close_adapter(self, source: str) -> None:
        """Let all engines unload an adapter; running requests keep it."""
        for session in self.sessions().values():
            session.send(CloseAdapter(source))


class OneEngine(EngineClient):
    """Keeps one engine running, which starts when it is first asked for.

    Args:
        connect: starts an engine.
        restart_delays: seconds between a crash and the next start, for each crash in a row that is tolerated. Once a
            request has run to its end, counting begins again.
        step_timeout: seconds of silence after which an engine is killed (see `Watchdog`); None: never.
        name: of the engine, for logs and errors.
    """

    num_replicas = 1

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
        self._forget_crashes()

    def start(self, after: "Future[Session] | None" = None) -> "Future[Session]":
        """The engine that runs, or that is being started, or that starts now: `after` another one is loaded, or has
        failed. Raises `EngineGivenUpError` if it has died too often in a row."""
        with self._lock:
            if self._session is None and self._next is not None:
                return self._next.started
            if self._session is None:
                if self._given_up is not None:
                    raise EngineGivenUpError(self._given_up)
                self._session = self._new_session(max(0.0, self._start_time - time.monotonic()), after)
            return self._session.started

    def sessions(self) -> dict[int, Session]:
        session = self._session
        return {0: session} if session is not None and session.is_ready else {}

    def num_crashes_of(self, number: int) -> int:
        return self.num_crashes

    def deliver(
        self,
        token_ids: Sequence[int],
        root: Root,
        num_sequences: int = 1,
        take: Callable[[Mail], None] | None = None,
        *,
        in_background: bool = False,
    ) -> AbstractContextManager[Mailbox]:
        for session in self.sessions().values():
            return session.mailbox(take)
        raise EngineDeadError("no engine is running")

    def replace(self) -> "Iterator[Future[Session | None]]":
        replaced: Future[Session | None] = shared_future()
        with self._lock:
            new = self._next = self._new_session()

        def loaded(started: "Future[Session]") -> None:
            old, error = None, started.exception()
            with self._lock:
                self._next = None
                if error is None and not new.is_stopped:
                    old, self._session = self._session, new
            if error is not None:
                replaced.set_exception(error)
                return
            if old is not None:
                old.retire()
            replaced.set_result(old)

        new.started.add_done_callback(loaded)
        yield replaced

    def stop(self) -> list[Session]:
        with self._lock:
            session, replacement = self._session, self._next
            self._session = None
            self._forget_crashes()
        for each in (session, replacement):
            if each is not None:
                each.stop()
        return [] if session is None else [session]

    def _new_session(self, delay: float = 0.0, after: "Future[Session] | None" = None) -> Session:
        return Session(self._connect, delay, self._ended, self._step_timeout, self._name, after)

    def _forget_crashes(self) -> None:
        self._num_in_a_row = 0
        self._start_time = 0.0
        self._given_up: str | None = None

    def _ended(self, session: Session, error: Exception) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
            if not isinstance(error, EngineDeadError) or session.is_stopped:
                return
            self.num_crashes += 1
            self._num_in_a_row = 1 if session.has_served else self._num_in_a_row + 1
            if (times := self._num_in_a_row) > len(self._restart_delays):
                self._given_up = f"{self._name} has died {times} times in a row; the last time, {error}"
                logger.error("%s, %d times in a row; giving up", error, times)
            else:
                delay = self._restart_delays[times - 1]
                self._start_time = time.monotonic() + delay
                logger.error("%s; it can be started again in %g s", error, delay)


def engine_in_thread(
    load: "Callable[[], Engine]",
    watching: Watching | None = None,
    restart_delays: Sequence[float] = RESTART_DELAYS,
    *,
    is_offline: bool = False,
) -> EngineClient:
    """An engine in a thread of this process; see `ThreadConnection`."""
    client = OneEngine(lambda: ThreadConnection(load, watching, is_offline=is_offline), restart_delays)
    _in_threads.add(client)
    return client
