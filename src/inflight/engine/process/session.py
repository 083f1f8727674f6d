"""`Session`: one engine from start to end, and the mailboxes of its readers. A thread listens to the engine. It makes
one call per event loop with all of a step's outputs for the loop's readers, so a step wakes a loop once. A slow reader
finds more in its mailbox, and delays no other.
"""

import asyncio
import builtins
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from inflight.contracts import errors
from inflight.contracts.errors import EngineDeadError, ModelError
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
    """Unread outputs of one request. Belongs to the event loop that it was made in.

    Attributes:
        address: the `request_id` to use in commands.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
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
        """Add an item. Call it in the mailbox's own loop."""
        self._mail.append(item)
        self._has_mail.set()


class DirectMailbox(Mailbox):
    """A mailbox without an event loop: calls a function with outputs, in the thread that listens to the engine.
    Mailboxes with the same function share one call per step.

    Args:
        take: that function.
    """

    def __init__(self, address: str, take: "Callable[[Mail], None]") -> None:
        self.address = address
        self.take = take


Mail: TypeAlias = list[tuple[Mailbox, Any]]
"""Outputs with their mailboxes."""


class Session:
    """One engine.

    Args:
        connect: starts the engine.
        delay: seconds to wait before that.
        on_end: called in a thread at the end, with the error that all waiting readers will get.
        step_timeout: see `Watchdog`; None: the engine is not watched.
        name: of the engine, for logs and errors.

    Attributes:
        started: resolves to this session once the engine is loaded, or to the error of loading.
        ready: the engine's `Ready` event.
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
    ) -> None:
        self._name = name
        self.started: Future[Session] = Future()
        self.started.set_running_or_notify_cancel()  # one waiter that gives up must not cancel it for all
        self.has_served = False
        self._connect, self._delay, self._on_end = connect, delay, on_end
        self._step_timeout = step_timeout
        self._watchdog: Watchdog | None = None
        self._connection: Connection | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox] = {}
        self._addresses = count()
        self._error: Exception | None = None
        self._is_retired = False
        self._thread = threading.Thread(target=self._run, name="inflight: from the engine", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the engine is loaded and takes requests."""
        return self.started.done() and self._error is None and not self._is_retired

    @contextmanager
    def mailbox(self, make: Callable[[str], Mailbox] = Mailbox) -> Iterator[Mailbox]:
        """Open a mailbox until the block ends. Raises `EngineDeadError` if the engine has died or is retired.

        Args:
            make: makes the mailbox from its address.
        """
        with self._lock:
            if self._error is not None:
                raise _copy(self._error)
            if self._is_retired:
                raise EngineDeadError(f"{self._name} was replaced")
            mailbox = make(str(next(self._addresses)))
            self._mailboxes[mailbox.address] = mailbox
        try:
            yield mailbox
        finally:
            self._close(mailbox.address)

    def retire(self) -> None:
        """Refuse new requests, and end the engine with its last one."""
        with self._lock:
            self._is_retired = True
        self._stop_if_done()

    def ask(self, command: Callable[[str], Command]) -> "Future[Any]":
        """Send a command with an answer. The future gets the answer, or the error of a refusal.

        Args:
            command: makes the command from the address to answer to.

        Raises:
            EngineDeadError: the engine has died or is retired.
        """
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        waiting = ExitStack()

        def take(mail: Mail) -> None:
            waiting.close()
            (_, item), *_ = mail
            if isinstance(item, Exception):
                answer.set_exception(item)
            else:
                answer.set_result(item)

        mailbox = waiting.enter_context(self.mailbox(lambda address: DirectMailbox(address, take)))
        self.send(command(mailbox.address))
        return answer

    @property
    def connection(self) -> Connection | None:
        """The engine's connection, once it is starting."""
        return self._connection

    def send(self, command: Command) -> None:
        """Queue a command; does nothing if the engine has died."""
        assert self._connection is not None
        self._connection.send(command)

    def stop(self) -> None:
        """Tell the engine to end, and return at once."""
        self._stopping.set()
        self._end_watch()
        if self._connection is not None:
            self._connection.close()

    def join(self) -> None:
        """Wait until a stopped engine has ended; kill it if it does not."""
        self._thread.join(SECONDS_TO_END)
        if self._thread.is_alive() and self._connection is not None:
            self._connection.kill()
        self._thread.join()

    def _run(self) -> None:
        try:
            error = self._listen()
        except BaseException as failure:  # the process did not start or sent garbage; or its thread was abandoned
            error = EngineDeadError(f"{self._name} could not be started or understood: {failure!r}")
            if self._connection is not None:
                self._connection.kill()
        self._end_watch()
        self._on_end(self, error)
        with self._lock:
            self._error = error
            addresses = list(self._mailboxes)
        self._post((address, _copy(error)) for address in addresses)
        if not self.started.done():
            self.started.set_exception(error)

    def _listen(self) -> Exception:
        """Start the engine and dispatch its events until it ends. Returns why it ended."""
        stopped = EngineDeadError(f"{self._name} was stopped")
        if self._stopping.wait(self._delay):
            return stopped
        start_time = time.monotonic()
        self._connection = connection = self._connect()
        if self._stopping.is_set():  # in between
            connection.close()
        failure: Failed | None = None

        def take(event: Event) -> None:
            nonlocal failure
            if isinstance(event, Failed):
                failure = event
            else:
                self._take_in(event)
            if isinstance(event, Ready):
                seconds = time.monotonic() - start_time
                logger.info("%s is ready after %.1f s: %s", self._name, seconds, _described(event))

        connection.listen(take)
        ending = connection.ending()
        if failure is not None and failure.is_model_error:
            return ModelError(failure.message)
        if self._stopping.is_set():
            return stopped
        if self._watchdog is not None and self._watchdog.has_killed is not None:
            return EngineDeadError(f"{self._name} did not answer for {self._watchdog.has_killed:g} s, and was killed")
        return EngineDeadError(f"{self._name} {ending}" + (f": {failure.message}" if failure else ""))

    def _take_in(self, event: Event) -> None:
        match event:
            case Outputs():
                self._post((output.request_id, output) for output in event.outputs)
                self.has_served |= any(output.finish_reason in ("stop", "length") for output in event.outputs)
            case Refused():
                self._post([(event.request_id, _error_named(event.error)(event.message))])
            case Stats(request_id=address) if address == _WATCHDOG:
                if self._watchdog is not None:
                    self._watchdog.answered()
            case Stats():
                self._post([(event.request_id, event.stats)])
            case Live():
                self._post([(event.request_id, event.state)])
            case Done():
                self._post([(event.request_id, event)])
            case Ready():
                self.ready = event
                self._watch()
                self.started.set_result(self)

    def _watch(self) -> None:
        connection = self._connection
        if self._step_timeout is not None and connection is not None and not self._stopping.is_set():
            ask = partial(self.send, AskStats(_WATCHDOG))
            self._watchdog = Watchdog(ask, connection.kill, self._step_timeout)

    def _end_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _post(self, messages: Iterable[tuple[str, object]]) -> None:
        """Deliver messages by address, skipping closed mailboxes."""
        of_loop: dict[asyncio.AbstractEventLoop, Mail] = {}
        of_function: dict[Callable[[Mail], None], Mail] = {}
        for address, message in messages:
            mailbox = self._mailboxes.get(address)
            if isinstance(mailbox, DirectMailbox):
                of_function.setdefault(mailbox.take, []).append((mailbox, message))
            elif mailbox is not None:
                of_loop.setdefault(mailbox.loop, []).append((mailbox, message))
        for take, mail in of_function.items():
            take(mail)
        for loop, mail in of_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, mail)
            except RuntimeError:  # the loop was closed, with all its readers
                for address in {mailbox.address for mailbox, _ in mail}:  # one may have several messages
                    self.send(Abort(address))
                    self._close(address)

    def _close(self, address: str) -> None:
        self._mailboxes.pop(address, None)
        if self._is_retired:
            self._stop_if_done()

    def _stop_if_done(self) -> None:
        with self._lock:
            is_done = self._is_retired and not self._mailboxes and not self._stopping.is_set()
        if is_done:
            self.stop()


def _put_all(mail: Mail) -> None:
    for mailbox, message in mail:
        mailbox.put(message)


def _described(ready: Ready) -> str:
    """Log the engine's settings for operators."""
    info = ready.model_info
    num_tokens = info.num_blocks * info.block_size // len(info.cache_groups)
    options = [
        f"{info.model_class}, {info.num_parameters / 1e6:,.1f} million parameters, {info.dtype} on {info.device}",
        info.threads,
        f"executor {info.executor}, attention {info.attention_backend}, forward pass {info.forward_pass}",
        *([] if info.quantization is None else [info.quantization]),
        f"context {info.max_model_len} tokens",
        f"cache {num_tokens} tokens, {num_tokens * info.kv_bytes_per_token / 1e6:,.0f} MB"
        if info.pooling is None
        else f"task {info.pooling.task}",
    ]
    return "; ".join(options)


def _error_named(name: str) -> type[Exception]:
    """One of our errors, or of Python's."""
    found: type[Exception] = getattr(errors, name, None) or getattr(builtins, name)
    return found


def _copy(error: Exception) -> Exception:
    """A copy for each reader: raising an exception writes into it."""
    return type(error)(str(error))
