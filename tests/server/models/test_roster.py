"""Which models are loaded and given up: any history of requests, loads, failures and losses."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.server.models.roster import FIRST_DELAY, LONGEST_DELAY, Decision, Roster

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
        self.roster = Roster(SIZES, max_loaded, max_bytes, idle_seconds)
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
        decision = self.roster.decide(self.now)
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
            for earlier in line[: line.index(name)]:  # nobody is overtaken
                assert earlier in self.loaded | self.loading | self.unloading
        return decision

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        if self.roster.failure(name, self.now) is None:
            self.waiting[self.roster.ask(name)] = name
        self.decide()

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(sorted({**self.inside, **self.waiting})))
        self.give_back(ticket)

    def give_back(self, ticket: int) -> None:
        self.roster.leave(ticket, self.now)
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
            tickets = self.roster.failed(name, ValueError("no"), self.now)
            assert tickets == [ticket for ticket, wanted in self.waiting.items() if wanted == name]
            for ticket in tickets:
                del self.waiting[ticket]
                self.roster.leave(ticket, self.now)  # of no effect
            assert self.roster.failure(name, self.now) is not None
        else:
            self.loaded.add(name)
            self.last_use[name] = self.now
            self.roster.loaded(name, SIZES[name], self.now)
        self.decide()

    @precondition(lambda self: self.loaded - self.lost)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded - self.lost)))
        self.lost.add(name)
        self.roster.lost(name, ValueError("dead"), self.now)
        self.decide()

    @precondition(lambda self: self.unloading)
    @rule(data=st.data())
    def end_unload(self, data: Any) -> None:
        self.finish_unload(data.draw(st.sampled_from(sorted(self.unloading))))

    def finish_unload(self, name: str) -> None:
        self.unloading.remove(name)
        self.lost.discard(name)
        self.roster.unloaded(name)
        self.decide()

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        until = self.now + seconds
        while (when := self.roster.next_time()) is not None and when <= until:
            self.now = max(self.now, when)
            decision = self.decide()
            assert decision.unload  # it was worth waking up
        self.now = until
        self.decide()

    @invariant()
    def memory_is_kept_within(self) -> None:
        if not hasattr(self, "roster"):
            return
        there = self.loading | self.loaded | self.unloading
        assert len(there) <= self.max_loaded
        assert self.max_bytes is None or len(there) < 2 or sum(SIZES[each] for each in there) <= self.max_bytes
        for name in SIZES:
            entry = self.roster[name]
            states = {"loading": self.loading, "loaded": self.loaded, "unloading": self.unloading}
            assert entry.state == next((state for state, names in states.items() if name in names), "unloaded")
            assert entry.num_uses == self.uses(name)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for name in dict.fromkeys(getattr(self, "waiting", {}).values()):
            if name in self.loaded - self.lost:  # it is another's turn first, and that one waits for this to fall idle
                assert name == self.roster.closed
                assert self.uses(name)
            elif name not in self.loaded:
                closed = self.roster.closed
                assert self.loading or self.unloading or (closed is not None and self.uses(closed))

    def teardown(self) -> None:
        """Once every request ends and every load succeeds, everybody's turn comes."""
        if not hasattr(self, "roster"):
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


def loaded(roster: Roster, *names: str) -> None:
    """Let models be loaded, one after another, and nobody use them."""
    for now, name in enumerate(names):
        ticket = roster.ask(name)
        assert roster.decide(now).load == [name]
        roster.loaded(name, SIZES[name], now)
        assert roster.decide(now).admitted == [ticket]
        roster.leave(ticket, now)


def test_the_one_used_least_recently_goes_first() -> None:
    roster = Roster(SIZES, 2)
    loaded(roster, "a", "b")
    ticket = roster.ask("a")
    assert roster.decide(6).admitted == [ticket]
    roster.leave(ticket, 7)
    roster.ask("c")
    assert roster.decide(8) == Decision(unload=["b"])
    roster.unloaded("b")
    assert roster.decide(9) == Decision(load=["c"])


def test_a_model_that_is_always_used_takes_no_more_requests_until_others_had_their_turn() -> None:
    roster = Roster(SIZES, 1)
    first = roster.ask("a")
    roster.decide(0)
    roster.loaded("a", 4, 0)
    assert roster.decide(0).admitted == [first]
    other = roster.ask("b")
    assert roster.decide(1) == Decision()
    assert roster.closed == "a"
    second = roster.ask("a")
    assert roster.decide(1) == Decision()
    roster.leave(first, 2)
    assert roster.decide(2) == Decision(unload=["a"])
    roster.unloaded("a")
    assert roster.decide(3) == Decision(load=["b"])
    roster.loaded("b", 3, 4)
    assert roster.decide(4).admitted == [other]
    assert roster.closed == "b"
    roster.leave(other, 5)
    roster.decide(5)
    roster.unloaded("b")
    roster.decide(6)
    roster.loaded("a", 4, 7)
    assert roster.decide(7).admitted == [second]


def test_a_closed_model_stays_closed_until_it_is_idle() -> None:
    roster = Roster(SIZES, 2)
    inside = []
    for now, name in enumerate(("a", "a", "b")):
        inside.append(roster.ask(name))
        if roster.decide(now).load:
            roster.loaded(name, SIZES[name], now)
            assert roster.decide(now).admitted == [inside[-1]]
    roster.ask("c")
    roster.decide(3)
    assert roster.closed == "a"
    roster.leave(inside[0], 4)  # now it was used later than the other one
    assert roster.decide(4) == Decision()
    assert roster.closed == "a"
    roster.leave(inside[2], 5)  # but if another one falls idle first, that one goes
    assert roster.decide(5) == Decision(unload=["b"])
    assert roster.closed is None


def test_when_nobody_waits_for_its_place_any_more_a_closed_model_takes_requests_again() -> None:
    roster = Roster(SIZES, 1)
    roster.ask("a")
    roster.decide(0)
    roster.loaded("a", 4, 0)
    roster.decide(0)
    other = roster.ask("b")
    assert roster.decide(1) == Decision()
    second = roster.ask("a")
    assert roster.decide(1) == Decision()
    roster.leave(other, 2)
    assert roster.decide(2).admitted == [second]


def test_idle_time_counts_from_the_end_of_the_last_request() -> None:
    roster = Roster(SIZES, 4, idle_seconds=10)
    loaded(roster, "a")
    ticket = roster.ask("a")
    roster.decide(8)
    assert roster.next_time() is None
    assert roster.decide(100) == Decision()
    roster.leave(ticket, 100)
    assert roster.next_time() == 110
    assert roster.decide(109) == Decision()
    assert roster.decide(110) == Decision(unload=["a"])


@pytest.mark.parametrize(("max_bytes", "unloaded"), [(9, []), (8, ["a"])])
def test_memory_is_a_limit_too(max_bytes: int, unloaded: list[str]) -> None:
    roster = Roster(SIZES, 4, max_bytes)
    loaded(roster, "a", "b")
    roster.ask("c")
    decision = roster.decide(3)
    assert (decision.unload, decision.load) == (unloaded, [] if unloaded else ["c"])


def test_one_model_alone_may_take_more_than_there_is() -> None:
    roster = Roster(SIZES, 4, max_bytes=1)
    loaded(roster, "a")
    roster.ask("d")
    assert roster.decide(1) == Decision(unload=["a"])


def test_what_a_model_takes_is_known_better_once_it_is_loaded() -> None:
    roster = Roster(SIZES, 4, max_bytes=6)
    roster.ask("a")
    roster.decide(0)
    roster.loaded("a", 1, 0)  # it was expected to take 4
    ticket = roster.ask("b")
    assert roster.decide(1).load == ["b"]
    roster.loaded("b", 3, 2)
    roster.decide(2)
    roster.leave(ticket, 3)
    roster.leave(0, 4)
    roster.ask("c")
    assert roster.decide(5).load == ["c"]  # 1 + 3 + 2
    roster.failed("c", ValueError("no"), 5)
    roster.lost("a", ValueError("dead"), 6)
    assert roster.decide(6).unload == ["a"]
    roster.unloaded("a")
    roster.ask("a")
    assert roster.decide(8) == Decision(unload=["b"])  # it is expected to take 4 again, while it is loaded


def test_a_model_that_cannot_be_loaded_is_tried_again_ever_later() -> None:
    roster, now, delays = Roster(SIZES, 4), 0.0, []
    for _ in range(9):
        ticket = roster.ask("a")
        roster.decide(now)
        assert roster.failed("a", error := ValueError("no"), now) == [ticket]
        failure = roster.failure("a", now)
        assert failure is not None
        assert failure.error is error
        delays.append(failure.retry_time - now)
        now = failure.retry_time
        assert roster.failure("a", now) is None
    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY
    roster.ask("a")
    assert roster.decide(now).load == ["a"]
    roster.loaded("a", 4, now)
    roster.lost("a", ValueError("dead"), now)
    failure = roster.failure("a", now)
    assert failure is not None
    assert failure.retry_time == now + FIRST_DELAY  # counted anew after a load
