"""`Session`: one engine from start to end, and the mailboxes of its readers. A thread listens to the engine. It makes
one call per event loop with all of a step's outputs for the loop's readers, so a step wakes a loop once. A slow reader
finds more in its mailbox, and delays no other.
"""

import asyncio
import builtins
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import MethodType
from typing import Any, TypeAlias

from inflight.contracts.api import errors
from inflight.contracts.api.errors import EngineDeadError, ModelError
from inflight.engine.process.connection import SECONDS_TO_END, Connection
from inflight.engine.process.protocol import (
    Abort,
    AskStats,
    Command,
    Done,
    Event,
    Failed,
    Live,
    Outputs,
    Ready,
    Refused,
    Stats,
)
from inflight.engine.process.watchdog import Watchdog

logger = logging.getLogger("inflight.engine")

_WATCHDOG = "watchdog"
"""The address of its answers; mailboxes have numbers."""


class Mailbox:
    """What comes for one request.

    Args:
        take: gets what comes, in the thread that listens to the engine. Several mailboxes may have the same function,
            which then gets all that a step gave them at once. None: what comes waits here for `read`, in the event loop
            that runs now.

    Attributes:
        session: of the engine that the request runs at.
        address: the `request_id` to use in commands.
        begin: to be called when something has come.
        token_ids: prompt and output, once the request has ended, if the next prompt may begin so.
    """

    def __init__(self, session: "Session", address: str, take: "Callable[[Mail], None] | None" = None) -> None:
        self.session, self.address = session, address
        self.take = MethodType(_wake, asyncio.get_running_loop()) if take is None else take
        self.begin: Callable[[], None] = lambda: None
        self.token_ids: Sequence[int] = ()
        self._mail: list[Any] = []
        self._has_mail = asyncio.Event()

    async def read(self) -> list[Any]:
        """Wait for outputs and take all of them. Raises the error if the request failed."""
        await self._has_mail.wait()
        self._has_mail.clear()
        mail, self._mail = self._mail, []
        if isinstance(mail[-1], Exception):
            raise mail[-1]
        return mail

    def put(self, item: object) -> None:
        """Add an item. Call this in the event loop of the reader."""
        self._mail.append(item)
        self._has_mail.set()


Mail: TypeAlias = list[tuple[Mailbox, Any]]
"""Outputs with their mailboxes."""


class _LoopClosedError(Exception):
    """An event loop is closed, and all of its readers are gone with it."""


def _wake(loop: asyncio.AbstractEventLoop, mail: Mail) -> None:
    """Let an event loop's readers have their mail. (Methods of one loop are equal, so `_post` calls one of them.)"""
    try:
        loop.call_soon_threadsafe(_put_all, mail)
    except RuntimeError as error:
        raise _LoopClosedError from error


def _put_all(mail: Mail) -> None:
    for mailbox, message in mail:
        mailbox.put(message)


class Session:
    """One engine.

    Args:
        connect: starts the engine.
        delay: seconds to wait before that.
        on_end: called in a thread at the end, with the error that all waiting readers will get.
        step_timeout: see `Watchdog`; None: the engine is not watched.
        name: of the engine, for logs and errors.
        after: another one's `started`, which must be done before this one starts.

    Attributes:
        started: done when the engine is loaded (with this session), or could not be loaded (with its error).
        ready: what the engine said when it was loaded.
        connection: what carries messages to the engine and back; None: it is not being started yet.
        has_served: whether a request has run to its end.
        is_stopped: whether the engine was told to end.
    """

    ready: Ready

    def __init__(
        self,
        connect: Callable[[], Connection],
        delay: float,
        on_end: Callable[["Session", Exception], None],
        step_timeout: float | None = None,
        name: str = "the engine",
        after: "Future[Session] | None" = None,
    ) -> None:
        self.started: Future[Session] = shared_future()
        self.connection: Connection | None = None
        self.has_served = False
        self._name = name
        self._step_timeout = step_timeout
        self._watchdog: Watchdog | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox] = {}
        self._addresses = count()
        self._refusal: Exception | None = None  # to new requests: the engine has ended, or ends with those it has
        start = partial(self._start, connect, delay, after)
        self._thread = threading.Thread(target=self._run, args=(start, on_end), name="inflight: from the engine")
        self._thread.daemon = True
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the engine is loaded and takes requests."""
        return self.started.done() and self._refusal is None

    @contextmanager
    def mailbox(self, take: Callable[[Mail], None] | None = None) -> Iterator[Mailbox]:
        """A new mailbox, until the block ends. Raises `EngineDeadError` if the engine has died or is retired."""
        mailbox = self._open(take)
        try:
            yield mailbox
        finally:
            self._close(mailbox)

    def ask(self, command: Callable[[str], Command]) -> "Future[Any]":
        """Send a command with an answer. The future gets the answer, or the error of a refusal.

        Args:
            command: makes the command from the address to answer to.

        Raises:
            EngineDeadError: the engine has died or is retired.
        """
        answer = shared_future()

        def take(mail: Mail) -> None:
            (mailbox, item), *_ = mail
            self._close(mailbox)
            if isinstance(item, Exception):
                answer.set_exception(item)
            else:
                answer.set_result(item)

        self.send(command(self._open(take).address))
        return answer

    def send(self, command: Command) -> None:
        """Queue a command for the engine; do nothing if it has died."""
        assert self.connection is not None
        self.connection.send(command)

    def retire(self) -> None:
        """Take no more requests, and end the engine with the last that it has."""
        with self._lock:
            self._refusal = self._refusal or EngineDeadError(f"{self._name} was replaced")
        self._stop_if_done()

    def stop(self) -> None:
        """Tell the engine to end, and return at once."""
        self._stopping.set()
        self._end_watch()
        if self.connection is not None:
            self.connection.close()

    def join(self) -> None:
        """Wait until a stopped engine has ended; kill it if it does not."""
        self._thread.join(SECONDS_TO_END)
        if self._thread.is_alive() and self.connection is not None:
            self.connection.kill()
        self._thread.join()

    # ------------------------------------------------------------------------------- the thread that listens

    def _run(self, start: Callable[[], Connection | None], on_end: Callable[["Session", Exception], None]) -> None:
        try:
            error = self._listen(start())
        except BaseException as failure:  # no process could be started, or understood; or its thread was left
            error = EngineDeadError(f"{self._name} could not be started or understood: {failure!r}")
            if self.connection is not None:
                self.connection.kill()
        self._end_watch()
        on_end(self, error)
        with self._lock:
            self._refusal = error
            addresses = list(self._mailboxes)
        self._post((address, _copy(error)) for address in addresses)
        if not self.started.done():
            self.started.set_exception(error)

    def _start(
        self, connect: Callable[[], Connection], delay: float, after: "Future[Session] | None"
    ) -> Connection | None:
        """Start the engine, when it is time; None: it was stopped before."""
        wait([] if after is None else [after])  # where all are stopped, this ends with that one
        if self._stopping.wait(delay):
            return None
        self.connection = connect()
        if self._stopping.is_set():  # in between
            self.connection.close()
        return self.connection

    def _listen(self, connection: Connection | None) -> Exception:
        """Take in the engine's events until it ends. Returns why it ended."""
        stopped, failure, start_time = EngineDeadError(f"{self._name} was stopped"), Failed(""), time.monotonic()
        if connection is None:
            return stopped

        def take(event: Event) -> None:
            nonlocal failure
            if isinstance(event, Failed):
                failure = event
            else:
                self._take_in(event, start_time)

        connection.listen(take)
        ending = connection.ending()
        if failure.is_model_error:
            return ModelError(failure.message)
        if self._stopping.is_set():
            return stopped
        if self._watchdog is not None and self._watchdog.has_killed is not None:
            ending = f"did not answer for {self._watchdog.has_killed:g} s, and was killed"
        return EngineDeadError(f"{self._name} {ending}" + (failure.message and f": {failure.message}"))

    def _take_in(self, event: Event, start_time: float) -> None:
        match event:
            case Outputs():
                self._post((output.request_id, output) for output in event.outputs)
                self.has_served |= any(output.finish_reason in ("stop", "length") for output in event.outputs)
            case Refused():
                error = getattr(errors, event.error, None) or getattr(builtins, event.error)
                self._post([(event.request_id, error(event.message))])
            case Stats(request_id=address) if address == _WATCHDOG:
                if self._watchdog is not None:
                    self._watchdog.answered()
            case Stats() | Live() | Done():
                self._post([(event.request_id, event.value)])
            case Ready():
                self.ready = event
                connection = self.connection
                if self._step_timeout is not None and connection is not None and not self._stopping.is_set():
                    ask = partial(self.send, AskStats(_WATCHDOG))
                    self._watchdog = Watchdog(ask, connection.kill, self._step_timeout)
                self.started.set_result(self)
                seconds = time.monotonic() - start_time
                logger.info("%s is ready after %.1f s: %s", self._name, seconds, event.model_info.summary())

    def _end_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _post(self, messages: Iterable[tuple[str, object]]) -> None:
        """Put messages into the mailboxes with their addresses, and skip mailboxes that were closed."""
        taken_by: dict[Callable[[Mail], None], Mail] = {}
        for address, message in messages:
            if (mailbox := self._mailboxes.get(address)) is not None:
                taken_by.setdefault(mailbox.take, []).append((mailbox, message))
        for take, mail in taken_by.items():
            try:
                take(mail)
            except _LoopClosedError:
                for mailbox in {mailbox for mailbox, _ in mail}:  # one may have several messages
                    self.send(Abort(mailbox.address))
                    self._close(mailbox)

    def _open(self, take: Callable[[Mail], None] | None) -> Mailbox:
        with self._lock:
            if self._refusal is not None:
                raise _copy(self._refusal)
            mailbox = Mailbox(self, str(next(self._addresses)), take)
            self._mailboxes[mailbox.address] = mailbox
            return mailbox

    def _close(self, mailbox: Mailbox) -> None:
        self._mailboxes.pop(mailbox.address, None)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._refusal is not None and not self._mailboxes:  # and there will be no more
            self.stop()


def shared_future() -> "Future[Any]":
    """One that many may wait for: none of them, giving up, cancels it for all."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _copy(error: Exception) -> Exception:
    """A copy for each reader: raising an exception writes into it."""
    return type(error)(str(error))
