"""`LoadScheduler`: decides which models to load and to unload, and which request is next. Does nothing itself.

Requests wait in one queue, first come, first served. A model is loaded if there is room; else the least recently used
idle one is unloaded first. If all are in use, the least recently used one is *closed*: new requests for it wait, so
that it becomes idle and no request starves. A model in use is never unloaded. A failed load is retried after a delay,
which grows each time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias

State: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading"]

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
"""Seconds before a failed load is retried; they double each time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A model could not be loaded, or was lost.

    Attributes:
        retry_time: when it may be tried again.
        number: failures in a row.
    """

    error: Exception
    retry_time: float
    number: int


@dataclass(slots=True)
class Entry:
    """One model.

    Attributes:
        num_bytes: its memory; before its load, an estimate.
        num_bytes_expected: the estimated peak of its load.
        num_uses: number of requests that use it.
        last_use: when the last of them began or ended.
        failure: why the last load failed; None: it did not.
        is_lost: loaded, but no longer usable.
    """

    num_bytes: int
    num_bytes_expected: int
    state: State = "unloaded"
    num_uses: int = 0
    last_use: float = 0.0
    failure: Failure | None = None
    is_lost: bool = False

    @property
    def is_idle(self) -> bool:
        return self.state == "loaded" and self.num_uses == 0


@dataclass(slots=True)
class Decision:
    """Models to load and to unload, and tickets to admit."""

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


class LoadScheduler:
    """Times are seconds of any clock.

    Args:
        num_bytes: for each model, its estimated memory.
        max_loaded: the most models loaded at once.
        max_bytes: their total memory; a single model may exceed it. None: no limit.
        idle_seconds: seconds without use after which a model is unloaded; None: never.

    Attributes:
        closed: the model that admits no requests, so that it becomes idle; None: none.
    """

    def __init__(
        self,
        num_bytes: Mapping[str, int],
        max_loaded: int,
        max_bytes: int | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        self.closed: str | None = None
        self._entries = {name: Entry(size, size) for name, size in num_bytes.items()}
        self._max_loaded, self._max_bytes, self._idle_seconds = max_loaded, max_bytes, idle_seconds
        self._numbers = count()
        self._line: dict[int, str] = {}
        self._inside: dict[int, str] = {}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    # ------------------------------------------------------------------------------------- requests

    def failure(self, name: str, now: float) -> Failure | None:
        """Why requests for this model are refused; None: not refused."""
        failure = self._entries[name].failure
        return failure if failure is not None and now < failure.retry_time else None

    def ask(self, name: str) -> int:
        """Join the queue for a model. Returns a ticket, which a decision admits."""
        ticket = next(self._numbers)
        self._line[ticket] = name
        return ticket

    def leave(self, ticket: int, now: float) -> None:
        """Return a ticket: its request has ended, or stopped waiting."""
        if self._line.pop(ticket, None) is None and (name := self._inside.pop(ticket, None)) is not None:
            self._entries[name].num_uses -= 1
            self._entries[name].last_use = now

    def model_of(self, ticket: int) -> str:
        """The model that an admitted ticket is for."""
        return self._inside[ticket]

    # ------------------------------------------------------------------------------------- models

    def loaded(self, name: str, num_bytes: int, now: float) -> None:
        """A model was loaded, and takes this much memory."""
        entry = self._entries[name]
        entry.state, entry.num_bytes, entry.last_use, entry.failure = "loaded", num_bytes, now, None

    def failed(self, name: str, error: Exception, now: float) -> list[int]:
        """A load failed. Returns the waiting tickets, which are then invalid."""
        entry = self._entries[name]
        entry.state = "unloaded"
        self._fail(entry, error, now)
        tickets = [ticket for ticket, wanted in self._line.items() if wanted == name]
        for ticket in tickets:
            del self._line[ticket]
        return tickets

    def lost(self, name: str, error: Exception, now: float) -> None:
        """A loaded model can no longer be used. It is unloaded with its last request."""
        entry = self._entries[name]
        entry.is_lost = True
        self._fail(entry, error, now)

    def unloaded(self, name: str) -> None:
        """A model was unloaded."""
        entry = self._entries[name]
        entry.state, entry.is_lost = "unloaded", False
        entry.num_bytes = max(entry.num_bytes, entry.num_bytes_expected)

    def _fail(self, entry: Entry, error: Exception, now: float) -> None:
        number = 1 if entry.failure is None else entry.failure.number + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (number - 1))
        entry.failure = Failure(error, now + delay, number)

    # ------------------------------------------------------------------------------------- decisions

    def decide(self, now: float) -> Decision:
        """Decide the next actions, which count as begun. Call it after each change."""
        decision = Decision()
        self._admit(decision, now)
        self._make_room(decision)
        self._admit(decision, now)  # to a reopened model
        for name, entry in self._entries.items():
            if entry.is_idle and (entry.is_lost or self._idle_end(entry) <= now):
                self._give_up(name, decision)
        return decision

    def next_time(self) -> float | None:
        """The next time to decide without a change; None: never."""
        ends = [self._idle_end(entry) for entry in self._entries.values() if entry.is_idle]
        return min(ends) if ends and self._idle_seconds is not None else None

    def _idle_end(self, entry: Entry) -> float:
        return float("inf") if self._idle_seconds is None else entry.last_use + self._idle_seconds

    def _admit(self, decision: Decision, now: float) -> None:
        for ticket, name in list(self._line.items()):
            entry = self._entries[name]
            if entry.state == "loaded" and not entry.is_lost and name != self.closed:
                del self._line[ticket]
                self._inside[ticket] = name
                entry.num_uses += 1
                entry.last_use = now
                decision.admitted.append(ticket)

    def _make_room(self, decision: Decision) -> None:
        """Load the queue's models in order; the first without room gets the next free memory."""
        before, self.closed = self.closed, None
        for name in dict.fromkeys(self._line.values()):
            entry = self._entries[name]
            if entry.state != "unloaded":
                continue
            if self._fits(entry):
                entry.state = "loading"
                decision.load.append(name)
                continue
            states = {each.state for each in self._entries.values()}
            loaded = [other for other, each in self._entries.items() if each.state == "loaded"]
            idle = [other for other in loaded if self._entries[other].is_idle]
            if "unloading" in states:
                pass  # the rest is decided then
            elif idle:
                self._give_up(min(idle, key=self._last_use), decision)
            elif loaded:
                self.closed = before if before in loaded else min(loaded, key=self._last_use)
            return

    def _give_up(self, name: str, decision: Decision) -> None:
        self._entries[name].state = "unloading"
        decision.unload.append(name)

    def _last_use(self, name: str) -> float:
        return self._entries[name].last_use

    def _fits(self, entry: Entry) -> bool:
        others = [each for each in self._entries.values() if each.state != "unloaded"]
        has_bytes = (
            self._max_bytes is None or sum(each.num_bytes for each in others) + entry.num_bytes <= self._max_bytes
        )
        return len(others) < self._max_loaded and (has_bytes or not others)
