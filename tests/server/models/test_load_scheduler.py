"""Which models are loaded and given up: any history of requests, loads, failures and losses."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.server.models.load_scheduler import FIRST_DELAY, LONGEST_DELAY, Decision, LoadScheduler

SIZES = {"a": 4, "b": 3, "c": 2, "d": 1}
NAMES = st.sampled_from(list(SIZES))


class Histories(RuleBasedStateMachine):
    """Keeps its own account of everything, and compares."""

    @initialize(
        max_loaded=st.integers(1, 4),
        max_bytes=st.none() | st.integers(1, 10),
        idle_seconds=st.none() | st.integers(1, 20),
    )
    def begin(self, max_loaded: int, max_bytes: int | None, idle_seconds: int | None) -> None:
        self.scheduler = LoadScheduler(SIZES, max_loaded, max_bytes, idle_seconds)
        self.max_loaded, self.max_bytes, self.idle_seconds = max_loaded, max_bytes, idle_seconds
        self.now = 0.0
        self.waiting: dict[int, str] = {}
        self.inside: dict[int, str] = {}
        self.loading: set[str] = set()
        self.loaded: set[str] = set()
        self.lost: set[str] = set()
        self.unloading: set[str] = set()
        self.last_use = dict.fromkeys(SIZES, 0.0)

    def uses(self, name: str) -> int:
        return sum(each == name for each in self.inside.values())

    def decide(self) -> Decision:
        idle_before = {name for name in self.loaded if not self.uses(name)}
        decision = self.scheduler.decide(self.now)
        for ticket in decision.admitted:
            name = self.waiting.pop(ticket)
            assert name in self.loaded - self.lost
            assert not any(other == name and earlier < ticket for earlier, other in self.waiting.items())
            self.inside[ticket] = name
            self.last_use[name] = self.now
        for name in decision.unload:
            assert name in self.loaded
            assert not self.uses(name)
            is_over = self.idle_seconds is not None and self.last_use[name] + self.idle_seconds <= self.now
            if name not in self.lost and not is_over:
                assert self.last_use[name] == min(self.last_use[each] for each in idle_before)
                assert self.waiting
            self.loaded.remove(name)
            self.unloading.add(name)
        line = list(dict.fromkeys(self.waiting.values()))
        for name in decision.load:
            assert name not in self.loaded | self.loading | self.unloading
            self.loading.add(name)
            for earlier in line[: line.index(name)]:  # no model is overtaken
                assert earlier in self.loaded | self.loading | self.unloading
        return decision

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        if self.scheduler.failure(name, self.now) is None:
            self.waiting[self.scheduler.ask(name)] = name
        self.decide()

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(sorted({**self.inside, **self.waiting})))
        self.give_back(ticket)

    def give_back(self, ticket: int) -> None:
        self.scheduler.leave(ticket, self.now)
        if (name := self.inside.pop(ticket, None)) is not None:
            self.last_use[name] = self.now
        self.waiting.pop(ticket, None)
        self.decide()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data: Any, fails: bool) -> None:
        self.finish_load(data.draw(st.sampled_from(sorted(self.loading))), fails)

    def finish_load(self, name: str, fails: bool) -> None:
        self.loading.remove(name)
        if fails:
            tickets = self.scheduler.failed(name, ValueError("no"), self.now)
            assert tickets == [ticket for ticket, wanted in self.waiting.items() if wanted == name]
            for ticket in tickets:
                del self.waiting[ticket]
                self.scheduler.leave(ticket, self.now)  # of no effect
            assert self.scheduler.failure(name, self.now) is not None
        else:
            self.loaded.add(name)
            self.last_use[name] = self.now
            self.scheduler.loaded(name, SIZES[name], self.now)
        self.decide()

    @precondition(lambda self: self.loaded - self.lost)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded - self.lost)))
        self.lost.add(name)
        self.scheduler.lost(name, ValueError("dead"), self.now)
        self.decide()

    @precondition(lambda self: self.unloading)
    @rule(data=st.data())
    def end_unload(self, data: Any) -> None:
        self.finish_unload(data.draw(st.sampled_from(sorted(self.unloading))))

    def finish_unload(self, name: str) -> None:
        self.unloading.remove(name)
        self.lost.discard(name)
        self.scheduler.unloaded(name)
        self.decide()

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        until = self.now + seconds
        while (when := self.scheduler.next_time()) is not None and when <= until:
            self.now = max(self.now, when)
            decision = self.decide()
            assert decision.unload  # it was worth waking up
        self.now = until
        self.decide()

    @invariant()
    def memory_is_kept_within(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        there = self.loading | self.loaded | self.unloading
        assert len(there) <= self.max_loaded
        assert self.max_bytes is None or len(there) < 2 or sum(SIZES[each] for each in there) <= self.max_bytes
        for name in SIZES:
            entry = self.scheduler[name]
            states = {"loading": self.loading, "loaded": self.loaded, "unloading": self.unloading}
            assert entry.state == next((state for state, names in states.items() if name in names), "unloaded")
            assert entry.num_uses == self.uses(name)

    @invariant()
    def only_a_full_machine_makes_requests_wait(self) -> None:
        for name in dict.fromkeys(getattr(self, "waiting", {}).values()):
            if name in self.loaded - self.lost:  # it is another's turn first, and that one waits for this to fall idle
                assert name == self.scheduler.closed
                assert self.uses(name)
            elif name not in self.loaded:
                closed = self.scheduler.closed
                assert self.loading or self.unloading or (closed is not None and self.uses(closed))

    def teardown(self) -> None:
        """Once every request ends and every load succeeds, every waiting request is served."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200):
            if not self.waiting:
                break
            for name in sorted(self.unloading):
                self.finish_unload(name)
            for name in sorted(self.loading):
                self.finish_load(name, fails=False)
            for ticket in sorted(self.inside)[:2]:
                self.give_back(ticket)
                if ticket % 3:
                    self.ask(list(SIZES)[ticket % 4])  # others go on asking
                    self.now += 1
        else:
            raise AssertionError(f"{self.waiting} still wait")


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def loaded(scheduler: LoadScheduler, *names: str) -> None:
    """Load models one after another, without using them."""
    for now, name in enumerate(names):
        ticket = scheduler.ask(name)
        assert scheduler.decide(now).load == [name]
        scheduler.loaded(name, SIZES[name], now)
        assert scheduler.decide(now).admitted == [ticket]
        scheduler.leave(ticket, now)


def test_the_one_used_least_recently_goes_first() -> None:
    scheduler = LoadScheduler(SIZES, 2)
    loaded(scheduler, "a", "b")
    ticket = scheduler.ask("a")
    assert scheduler.decide(6).admitted == [ticket]
    scheduler.leave(ticket, 7)
    scheduler.ask("c")
    assert scheduler.decide(8) == Decision(unload=["b"])
    scheduler.unloaded("b")
    assert scheduler.decide(9) == Decision(load=["c"])


def test_a_model_that_is_always_used_takes_no_more_requests_until_others_had_their_turn() -> None:
    scheduler = LoadScheduler(SIZES, 1)
    first = scheduler.ask("a")
    scheduler.decide(0)
    scheduler.loaded("a", 4, 0)
    assert scheduler.decide(0).admitted == [first]
    other = scheduler.ask("b")
    assert scheduler.decide(1) == Decision()
    assert scheduler.closed == "a"
    second = scheduler.ask("a")
    assert scheduler.decide(1) == Decision()
    scheduler.leave(first, 2)
    assert scheduler.decide(2) == Decision(unload=["a"])
    scheduler.unloaded("a")
    assert scheduler.decide(3) == Decision(load=["b"])
    scheduler.loaded("b", 3, 4)
    assert scheduler.decide(4).admitted == [other]
    assert scheduler.closed == "b"
    scheduler.leave(other, 5)
    scheduler.decide(5)
    scheduler.unloaded("b")
    scheduler.decide(6)
    scheduler.loaded("a", 4, 7)
    assert scheduler.decide(7).admitted == [second]


def test_a_closed_model_stays_closed_until_it_is_idle() -> None:
    scheduler = LoadScheduler(SIZES, 2)
    inside = []
    for now, name in enumerate(("a", "a", "b")):
        inside.append(scheduler.ask(name))
        if scheduler.decide(now).load:
            scheduler.loaded(name, SIZES[name], now)
            assert scheduler.decide(now).admitted == [inside[-1]]
    scheduler.ask("c")
    scheduler.decide(3)
    assert scheduler.closed == "a"
    scheduler.leave(inside[0], 4)  # now it was used later than the other one
    assert scheduler.decide(4) == Decision()
    assert scheduler.closed == "a"
    scheduler.leave(inside[2], 5)  # but if another one falls idle first, that one goes
    assert scheduler.decide(5) == Decision(unload=["b"])
    assert scheduler.closed is None


def test_a_closed_model_takes_requests_again_when_no_model_waits_for_its_place() -> None:
    scheduler = LoadScheduler(SIZES, 1)
    scheduler.ask("a")
    scheduler.decide(0)
    scheduler.loaded("a", 4, 0)
    scheduler.decide(0)
    other = scheduler.ask("b")
    assert scheduler.decide(1) == Decision()
    second = scheduler.ask("a")
    assert scheduler.decide(1) == Decision()
    scheduler.leave(other, 2)
    assert scheduler.decide(2).admitted == [second]


def test_idle_time_counts_from_the_end_of_the_last_request() -> None:
    scheduler = LoadScheduler(SIZES, 4, idle_seconds=10)
    loaded(scheduler, "a")
    ticket = scheduler.ask("a")
    scheduler.decide(8)
    assert scheduler.next_time() is None
    assert scheduler.decide(100) == Decision()
    scheduler.leave(ticket, 100)
    assert scheduler.next_time() == 110
    assert scheduler.decide(109) == Decision()
    assert scheduler.decide(110) == Decision(unload=["a"])


@pytest.mark.parametrize(("max_bytes", "unloaded"), [(9, []), (8, ["a"])])
def test_memory_is_a_limit_too(max_bytes: int, unloaded: list[str]) -> None:
    scheduler = LoadScheduler(SIZES, 4, max_bytes)
    loaded(scheduler, "a", "b")
    scheduler.ask("c")
    decision = scheduler.decide(3)
    assert (decision.unload, decision.load) == (unloaded, [] if unloaded else ["c"])


def test_one_model_alone_may_take_more_than_there_is() -> None:
    scheduler = LoadScheduler(SIZES, 4, max_bytes=1)
    loaded(scheduler, "a")
    scheduler.ask("d")
    assert scheduler.decide(1) == Decision(unload=["a"])


def test_what_a_model_takes_is_known_better_once_it_is_loaded() -> None:
    scheduler = LoadScheduler(SIZES, 4, max_bytes=6)
    scheduler.ask("a")
    scheduler.decide(0)
    scheduler.loaded("a", 1, 0)  # it was expected to take 4
    ticket = scheduler.ask("b")
    assert scheduler.decide(1).load == ["b"]
    scheduler.loaded("b", 3, 2)
    scheduler.decide(2)
    scheduler.leave(ticket, 3)
    scheduler.leave(0, 4)
    scheduler.ask("c")
    assert scheduler.decide(5).load == ["c"]  # 1 + 3 + 2
    scheduler.failed("c", ValueError("no"), 5)
    scheduler.lost("a", ValueError("dead"), 6)
    assert scheduler.decide(6).unload == ["a"]
    scheduler.unloaded("a")
    scheduler.ask("a")
    assert scheduler.decide(8) == Decision(unload=["b"])  # it is expected to take 4 again, while it is loaded


def test_a_model_that_cannot_be_loaded_is_tried_again_ever_later() -> None:
    scheduler, now, delays = LoadScheduler(SIZES, 4), 0.0, []
    for _ in range(9):
        ticket = scheduler.ask("a")
        scheduler.decide(now)
        assert scheduler.failed("a", error := ValueError("no"), now) == [ticket]
        failure = scheduler.failure("a", now)
        assert failure is not None
        assert failure.error is error
        delays.append(failure.retry_time - now)
        now = failure.retry_time
        assert scheduler.failure("a", now) is None
    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY
    scheduler.ask("a")
    assert scheduler.decide(now).load == ["a"]
    scheduler.loaded("a", 4, now)
    scheduler.lost("a", ValueError("dead"), now)
    failure = scheduler.failure("a", now)
    assert failure is not None
    assert failure.retry_time == now + FIRST_DELAY  # a successful load resets the delay
