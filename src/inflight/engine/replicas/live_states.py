"""Live states of running engines: `live_states` polls them; `RequestNames` maps requests' addresses to their callers'
names."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from inflight.contracts.step.live import LiveState
from inflight.contracts.step.record import RecordTo
from inflight.engine.process.protocol import AskLive
from inflight.engine.process.session import Session

MOST_ENDED = 256
"""The number of finished requests that keep their names, because engines report their last steps a little later."""

SECONDS_TO_ANSWER = 1.0
"""An engine that takes longer is in a long step, and is left out."""


class RequestNames:
    """Callers' names of requests, by session and address. Thread-safe."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Session, dict[str, str]] = WeakKeyDictionary()
        self._ended: deque[tuple[Session, str]] = deque()

    @contextmanager
    def named(self, session: Session, address: str, name: str) -> Iterator[None]:
        """Name the request at this address until the block ends, and for a while after."""
        self._names.setdefault(session, {})[address] = name
        try:
            yield
        finally:
            self._ended.append((session, address))
            if len(self._ended) > MOST_ENDED:
                old_session, old_address = self._ended.popleft()
                self._names.get(old_session, {}).pop(old_address, None)

    def for_session(self, session: Session) -> dict[str, str]:
        """The names of a session's requests, by address."""
        return self._names.get(session, {})


async def live_states(
    sessions: Callable[[], Mapping[int, Session]],
    names: RequestNames,
    interval: float,
    record_to: Callable[[int], RecordTo | None],
) -> AsyncGenerator[dict[int, LiveState], None]:
    """Poll all running engines and yield their states by number. An engine in a long step is left out until it answers.

    Args:
        sessions: returns the running engines.
        interval: seconds between polls; more if engines take longer to answer.
        record_to: where each engine records its steps while it is watched.
    """
    asked: dict[Session, asyncio.Task[LiveState]] = {}
    loop = asyncio.get_running_loop()
    try:
        while True:
            next_look = loop.time() + interval
            running = sessions()
            for number, session in running.items():
                if session not in asked:
                    asked[session] = asyncio.ensure_future(_look(session, record_to(number)))
            if asked:
                await asyncio.wait(asked.values(), timeout=max(interval, SECONDS_TO_ANSWER))
            seen: dict[int, LiveState] = {}
            for number, session in running.items():
                if asked[session].done() and asked[session].exception() is None:
                    seen[number] = asked[session].result().renamed(names.for_session(session))
            asked = {session: task for session, task in asked.items() if not task.done()}
            yield seen
            await asyncio.sleep(next_look - loop.time())
    finally:
        for task in asked.values():
            task.cancel()


async def _look(session: Session, record_to: RecordTo | None) -> LiveState:
    state: LiveState = await asyncio.wrap_future(session.ask(partial(AskLive, record_to=record_to)))
    return state


def recording_of(record_to: RecordTo, number: int, num_engines: int) -> RecordTo:
    """The recording options of one of several engines: each has its own file."""
    if num_engines == 1:
        return record_to
    path = Path(record_to.path)
    return replace(record_to, path=str(path.with_name(f"{path.stem}-{number}{path.suffix}")))
