"""`Fleet`: several engines of one model, of which each request gets one.

Replicas of one NUMA node are loaded one after another: what the first has found out and laid out, the others find. The
first that is loaded takes all requests until others are.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from inflight.contracts.api.config import RESTART_DELAYS, ROUTINGS, FleetConfig
from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError
from inflight.contracts.step.block_hash import Root
from inflight.engine.client import EngineClient, OneEngine
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.process.protocol import Load
from inflight.engine.process.session import Mail, Mailbox, Session, shared_future
from inflight.engine.replicas.launch import Launches
from inflight.engine.replicas.router import ReplicaSize, RoutedRequest, Router


class Fleet(EngineClient):
    """Several engines.

    Args:
        launches: starts them.
        restart_delays, step_timeout: see `OneEngine`.
        routing: see `Router`.
        num_slots: how many sequences a replica runs at once.
    """

    def __init__(
        self,
        launches: Launches,
        restart_delays: Sequence[float] = RESTART_DELAYS,
        step_timeout: float | None = None,
        routing: str = ROUTINGS[0],
        num_slots: int = 1,
    ) -> None:
        self.num_replicas = len(launches.connects)
        self._launches = launches
        self._engines = [
            OneEngine(connect, restart_delays, step_timeout, f"replica {number}")
            for number, connect in enumerate(launches.connects)
        ]
        self._routing = routing
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._router: Router | None = None
        self._known: dict[int, Session] = {}  # to the router

    @property
    def num_crashes(self) -> int:  # type: ignore[override]
        return sum(each.num_crashes for each in self._engines)

    def num_crashes_of(self, number: int) -> int:
        return self._engines[number].num_crashes

    def start(self) -> "Future[Session]":
        given_up: EngineGivenUpError | None = None
        started: dict[int | None, Future[Session]] = {}
        for number, after in enumerate(self._launches.after):
            try:
                started[number] = self._engines[number].start(started.get(after))
            except EngineGivenUpError as error:
                given_up = error
        if given_up is not None and not started:
            raise given_up
        return _first_result(list(started.values()))

    def stop(self) -> list[Session]:
        return [session for each in self._engines for session in each.stop()]

    def sessions(self) -> dict[int, Session]:
        return {number: each for number, engine in enumerate(self._engines) for each in engine.sessions().values()}

    def replace(self) -> "Iterator[Future[Session | None]]":
        self._launches.forget_weights()
        for engine in self._engines:
            yield from engine.replace()

    @contextmanager
    def deliver(
        self,
        token_ids: Sequence[int],
        root: Root,
        num_sequences: int = 1,
        take: Callable[[Mail], None] | None = None,
        *,
        in_background: bool = False,
    ) -> Iterator[Mailbox]:
        available = self.sessions()
        failure = EngineDeadError("no engine is running")
        while available:
            with self._lock:
                router, now = self._router_of(available), time.monotonic()
                sent = router.send(token_ids, root, list(available), now, num_sequences, in_background=in_background)
            session, at = available.pop(sent.replica), None
            try:
                with session.mailbox(take) as at:
                    at.begin = partial(self._begin, router, sent)
                    yield at
                return
            except EngineDeadError as error:
                if at is not None:
                    raise
                failure = error  # it has died just now
            finally:
                with self._lock:
                    can_help = at is not None and self._known.get(sent.replica) is session
                    router.end(sent, time.monotonic(), at.token_ids if can_help and at is not None else (), root)
        raise failure

    def _begin(self, router: Router, sent: RoutedRequest) -> None:
        if not sent.has_begun:
            with self._lock:
                router.begin(sent, time.monotonic())

    def _router_of(self, sessions: dict[int, Session]) -> Router:
        """The router; it learns which engines are new."""
        if self._router is None:
            info = next(iter(sessions.values())).ready.model_info
            num_blocks = info.num_blocks // len(info.cache_groups) if info.can_share_prefixes else 0
            size = ReplicaSize(self._num_slots, num_blocks, info.block_size)
            self._router = Router(self._routing, len(self._engines), size)
        for number, session in sessions.items():
            if self._known.get(number) is not session:
                self._known[number] = session
                self._router.forget(number)
        return self._router


def _first_result(futures: "Sequence[Future[Session]]") -> "Future[Session]":
    """The first result of several; an error only if all have failed."""
    for future in futures:
        if future.done() and future.exception() is None:
            return future
    first: Future[Session] = shared_future()
    left, lock = set(futures), threading.Lock()

    def done(future: "Future[Session]") -> None:
        with lock:
            left.discard(future)
            if not first.done() and (error := future.exception()) is None:
                first.set_result(future.result())
            elif not first.done() and not left:
                first.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return first


def engines_in_processes(load: Load, number: int, fleet: FleetConfig) -> EngineClient:
    """`number` engines, each in a process and on cores of its own."""
    if number == 1:
        return OneEngine(lambda: ProcessConnection(load), fleet.restart_delays, fleet.step_timeout)
    num_slots = load.config.scheduling.max_num_seqs
    return Fleet(Launches(load, number), fleet.restart_delays, fleet.step_timeout, fleet.routing, num_slots)
