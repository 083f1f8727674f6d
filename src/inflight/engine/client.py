"""`EngineClient`: the fronts' client of one model's engines. Starts, restarts and replaces them, and routes requests.
Knows no prompt and no text.

Replicas of one NUMA node load one after another: the first one's preparation and weights serve the others. The first
loaded replica takes all requests until others are ready.
"""

import atexit
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from inflight.contracts.config import ROUTINGS
from inflight.contracts.errors import EngineDeadError, EngineGivenUpError
from inflight.contracts.outputs import CompletionOutput
from inflight.contracts.watching import Watching
from inflight.engine.process.connection import Connection, ThreadConnection
from inflight.engine.process.protocol import CloseAdapter, Load, OpenAdapter
from inflight.engine.process.session import Mailbox, Session
from inflight.engine.process.supervisor import RESTART_DELAYS, Supervisor
from inflight.engine.replicas.launch import Launches
from inflight.engine.replicas.router import ReplicaSize, RoutedRequest, Router

if TYPE_CHECKING:
    from inflight.engine.engine import Engine

_in_threads: "WeakSet[EngineClient]" = WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread inside a step would crash the interpreter at exit."""
    for client in list(_in_threads):
        client.close()


class Delivery:
    """A request at one of the engines.

    Attributes:
        session: that engine's.
        mailbox: receives its outputs.
    """

    def __init__(self, session: Session, mailbox: Mailbox, has_begun: Callable[[], None]) -> None:
        self.session, self.mailbox = session, mailbox
        self._result: tuple[Sequence[int], Sequence[CompletionOutput]] = (), ()
        self._has_begun: Callable[[], None] | None = has_begun

    def begin(self) -> None:
        """The first token has arrived."""
        if self._has_begun is not None:
            self._has_begun()
            self._has_begun = None

    def end_with(self, prompt: Sequence[int], outputs: Sequence[CompletionOutput]) -> None:
        """The outcome of a prompt."""
        self._result = prompt, outputs

    def token_ids(self) -> list[int]:
        """Prompt and output, if it has ended: the next prompt may begin with them."""
        prompt, outputs = self._result
        return [*prompt, *outputs[0].token_ids] if outputs else []


class EngineClient:
    """The methods are thread-safe.

    Args:
        connects: for each replica, a function that starts its engine.
        after: for each replica, the one that must load first; None: none.
        restart_delays, step_timeout: see `Supervisor`.
        routing: see `Router`.
        num_slots: how many sequences a replica runs at once.
    """

    def __init__(
        self,
        connects: Sequence[Callable[[], Connection]],
        after: Sequence[int | None],
        restart_delays: Sequence[float] = RESTART_DELAYS,
        step_timeout: float | None = None,
        routing: str = ROUTINGS[0],
        num_slots: int = 1,
    ) -> None:
        names = [f"replica {number}" for number in range(len(connects))] if len(connects) > 1 else ["the engine"]
        self._supervisors = [
            Supervisor(connect, restart_delays, step_timeout, name)
            for connect, name in zip(connects, names, strict=True)
        ]
        self._after = after
        self._routing = routing
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._router: Router | None = None
        self._known: dict[int, Session] = {}  # to the router
        self._is_wanted = False
        self._tried: set[int] = set()  # those whose first start has succeeded or failed
        self._launches: Launches | None = None

    @classmethod
    def in_thread(
        cls,
        load: "Callable[[], Engine]",
        watching: Watching | None = None,
        restart_delays: Sequence[float] = RESTART_DELAYS,
        *,
        is_offline: bool = False,
    ) -> Self:
        """An engine in a thread of this process; see `ThreadConnection`."""
        client = cls([lambda: ThreadConnection(load, watching, is_offline=is_offline)], [None], restart_delays)
        _in_threads.add(client)
        return client

    @classmethod
    def in_processes(
        cls,
        load: Load,
        number: int,
        restart_delays: Sequence[float] = RESTART_DELAYS,
        step_timeout: float | None = None,
        routing: str = ROUTINGS[0],
    ) -> Self:
        """`number` engines, each in its own process, on its own cores."""
        launches = Launches(load, number)
        slots = load.config.max_num_seqs
        client = cls(launches.connects, launches.after, restart_delays, step_timeout, routing, slots)
        client._launches = launches
        return client

    @property
    def num_replicas(self) -> int:
        """Number of engines, running or not."""
        return len(self._supervisors)

    @property
    def num_crashes(self) -> int:
        """Number of crashes."""
        return sum(each.num_crashes for each in self._supervisors)

    def num_crashes_of(self, number: int) -> int:
        """Number of crashes of one replica."""
        return self._supervisors[number].num_crashes

    # ------------------------------------------------------------------------------------- engines

    def start(self) -> "Future[Session]":
        """Start all engines that do not run. Returns the first one loaded, as soon as it is.

        Raises `EngineGivenUpError` if each has died too often in a row."""
        self._is_wanted = True
        given_up: EngineGivenUpError | None = None
        started = []
        for number, after in enumerate(self._after):
            if after is None or after in self._tried:
                try:
                    started.append(self._start(number))
                except EngineGivenUpError as error:
                    given_up = error
        if given_up is not None and not started:
            raise given_up
        return started[0] if len(started) == 1 else _first_result(started)

    def stop(self) -> list[Session]:
        """Tell all engines to end; return their sessions at once, for joining."""
        self._is_wanted = False
        self._tried.clear()
        return [session for each in self._supervisors if (session := each.stop()) is not None]

    def close(self) -> None:
        """End all engines, and wait until they have ended."""
        for session in self.stop():
            session.join()

    def sessions(self) -> dict[int, Session]:
        """The loaded, running engines, by replica."""
        running = ((number, each.running) for number, each in enumerate(self._supervisors))
        return {number: session for number, session in running if session is not None}

    def replace(self) -> "Iterator[Future[Session | None]]":
        """Replace the engines one after another. Each future resolves to the old engine once the new one is loaded and
        takes the requests; the old one ends with its last request, and then the caller takes the next future. If
        loading fails, the future has the error, and the old engine stays."""
        if self._launches is not None:
            self._launches.forget_weights()
        return (each.replace() for each in self._supervisors)

    def _start(self, number: int) -> "Future[Session]":
        started = self._supervisors[number].start()
        if number not in self._tried and number in self._after:
            started.add_done_callback(lambda _: self._start_after(number))
        return started

    def _start_after(self, number: int) -> None:
        self._tried.add(number)
        for follower, after in enumerate(self._after):
            if after == number and self._is_wanted:
                with suppress(EngineGivenUpError):  # which the next call reports
                    self._start(follower)

    def open_adapter(self, source: str) -> "list[Future[object]]":
        """Let all engines load an adapter. The futures raise `AdapterError`, `EngineDeadError`."""
        return [each.ask(lambda address: OpenAdapter(address, source)) for each in self.sessions().values()]

    def close_adapter(self, source: str) -> None:
        """Let all engines unload an adapter; running requests keep it."""
        for session in self.sessions().values():
            session.send(CloseAdapter(source))

    # ------------------------------------------------------------------------------------- requests

    @contextmanager
    def deliver(
        self,
        token_ids: Sequence[int],
        kind: Hashable,
        num_sequences: int = 1,
        make_mailbox: Callable[[str], Mailbox] = Mailbox,
        *,
        in_background: bool = False,
    ) -> Iterator[Delivery]:
        """Choose an engine for a request, which counts there until the block ends. Raises `EngineDeadError`.

        Args:
            kind: salt and adapter, which must be equal for two prompts to share a prefix.
        """
        available = self.sessions()
        failure = EngineDeadError("no engine is running")
        if len(self._supervisors) == 1 and available:
            with available[0].mailbox(make_mailbox) as mailbox:
                yield Delivery(available[0], mailbox, lambda: None)
            return
        while available:
            with self._lock:
                router = self._router_of(available)
                sent = router.send(
                    token_ids,
                    kind,
                    list(available),
                    time.monotonic(),
                    num_sequences,
                    in_background=in_background,
                )
            session, delivery = available.pop(sent.replica), None
            try:
                with session.mailbox(make_mailbox) as mailbox:
                    delivery = Delivery(session, mailbox, partial(self._begin, router, sent))
                    yield delivery
                return
            except EngineDeadError as error:
                if delivery is not None:
                    raise
                failure = error  # it has died just now
            finally:
                with self._lock:
                    is_there = self._known.get(sent.replica) is session
                    can_help = delivery is not None and is_there and len(self._supervisors) > 1
                    token_ids = delivery.token_ids() if delivery is not None and can_help else ()
                    router.end(sent, time.monotonic(), token_ids, kind)
        raise failure

    def _begin(self, router: Router, sent: RoutedRequest) -> None:
        with self._lock:
            router.begin(sent, time.monotonic())

    def _router_of(self, sessions: dict[int, Session]) -> Router:
        """The router, told of new engines."""
        if self._router is None:
            info = next(iter(sessions.values())).ready.model_info
            num_blocks = info.num_blocks // len(info.cache_groups) if info.can_share_prefixes else 0
            size = ReplicaSize(self._num_slots, num_blocks, info.block_size)
            self._router = Router(self._routing, len(self._supervisors), size)
        for number, session in sessions.items():
            if self._known.get(number) is not session:
                self._known[number] = session
                self._router.forget(number)
        return self._router


def _first_result(futures: "Sequence[Future[Session]]") -> "Future[Session]":
    """The first successful result; an error only if all fail."""
    for future in futures:
        if future.done() and future.exception() is None:
            return future
    first: Future[Session] = Future()
    first.set_running_or_notify_cancel()
    lock = threading.Lock()
    num_left = len(futures)

    def done(future: "Future[Session]") -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            if first.done():
                return
            if (error := future.exception()) is None:
                first.set_result(future.result())
            elif num_left == 0:
                first.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return first
