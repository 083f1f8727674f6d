"""Which replica gets a request, and what the router keeps of all that it has sent."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.contracts.api.config import ROUTINGS
from inflight.contracts.step.block_hash import Root
from inflight.engine.replicas.router import ReplicaLoad, ReplicaSize, RoutedRequest, Router, TtftEstimator

SIZE = ReplicaSize(num_slots=8, num_blocks=64, block_size=4)
ALL = (0, 1, 2, 3)


def prompt(number: int, length: int = 40) -> list[int]:
    return [number * 1000 + place for place in range(length)]


class Clock:
    """A router with a clock that stands still unless it is moved."""

    def __init__(self, routing: str = "prefix", size: ReplicaSize = SIZE, num_replicas: int = 4) -> None:
        self.router = Router(routing, num_replicas, size)
        self.now = 0.0

    def send(self, token_ids: list[int], available: tuple[int, ...] = ALL, salt: str | None = None) -> RoutedRequest:
        return self.router.send(token_ids, Root(salt), available, self.now)

    def finish(self, sent: RoutedRequest, token_ids: list[int] | None = None, salt: str | None = None) -> None:
        self.now += 0.1
        self.router.begin(sent, self.now)
        self.now += 0.1
        self.router.end(sent, self.now, token_ids or (), Root(salt))


def test_a_session_stays_where_its_history_is() -> None:
    clock = Clock()
    histories = {number: prompt(number) for number in range(8)}
    homes = {number: clock.send(history) for number, history in histories.items()}
    assert Counter(sent.replica for sent in homes.values()) == dict.fromkeys(ALL, 2)
    for number, sent in homes.items():
        histories[number] += prompt(number + 100, 20)  # the answer
        clock.finish(sent, histories[number])
    for turn in range(5):
        for number, history in histories.items():
            history += prompt(1000 * turn + number, 4)
            sent = clock.send(history)
            assert sent.replica == homes[number].replica
            assert sent.num_owed < 20
            clock.finish(sent, history)


def test_others_salts_share_nothing() -> None:
    clock = Clock()
    clock.finish(clock.send(prompt(1), salt="a"))
    assert clock.send(prompt(1), salt="b").num_owed == 40
    assert clock.send(prompt(1), salt="a").num_owed == 1


def test_a_prefix_spreads_when_its_replica_is_busier_than_computing_it_again_would_take() -> None:
    clock = Clock()
    first = clock.send(prompt(1))
    clock.finish(first)
    sent = [clock.send(prompt(1) + prompt(number, 4)) for number in range(2, 34)]
    used = Counter(each.replica for each in sent)
    assert used[first.replica] == max(used.values())
    assert len(used) == 4


def test_a_replica_that_owes_much_gets_nothing_more() -> None:
    clock = Clock(num_replicas=2)
    busy = clock.send(prompt(0, 4000), (0, 1))
    assert {clock.send(prompt(number), (0, 1)).replica for number in range(1, 8)} == {1 - busy.replica}


def test_requests_do_not_wait_for_the_background_which_is_spread_too() -> None:
    clock = Clock(num_replicas=2)

    def send(number: int, *, in_background: bool) -> RoutedRequest:
        return clock.router.send(prompt(number, 400), Root(), (0, 1), clock.now, in_background=in_background)

    job = [send(number, in_background=True) for number in range(8)]
    assert Counter(sent.replica for sent in job) == {0: 4, 1: 4}
    home = send(100, in_background=False)
    clock.finish(home, prompt(100, 400))
    busy = job[0].replica if job[0].replica != home.replica else 1 - home.replica
    for sent in job:
        if sent.replica == busy:
            clock.router.end(sent, clock.now)
    assert send(100, in_background=False).replica == home.replica  # though the other one has nothing to do
    line = clock.router._expectation._line.tolist()
    clock.now += 1000
    waiting = next(sent for sent in job if sent.replica == home.replica)
    clock.router.begin(waiting, clock.now)
    clock.router.end(waiting, clock.now + 1000)
    assert clock.router._expectation._line.tolist() == line  # nothing is learned from who waits for everybody


def test_only_available_replicas_are_chosen_and_a_new_engine_has_nothing() -> None:
    for routing in ROUTINGS:
        clock = Clock(routing)
        assert {clock.send(prompt(number), (1, 3)).replica for number in range(20)} == {1, 3}
        assert clock.send(prompt(77), (2,)).replica == 2
    clock = Clock()
    clock.finish(clock.send(prompt(1), (2,)))
    clock.router.forget(2)
    assert clock.send(prompt(1), (2,)).num_owed == 40


def test_least_loaded_and_round_robin() -> None:
    clock = Clock("round-robin")
    assert Counter(clock.send(prompt(1)).replica for _ in range(40)) == dict.fromkeys(ALL, 10)
    clock = Clock("least-loaded")
    sent = [clock.send(prompt(1)) for _ in range(8)]
    for each in sent:
        if each.replica == 2:
            clock.finish(each)
    assert [clock.send(prompt(1)).replica for _ in range(2)] == [2, 2]


def test_a_cache_that_shares_nothing_is_expected_to_have_nothing() -> None:
    clock = Clock(size=ReplicaSize(8, 0, 4))
    clock.finish(clock.send(prompt(1)), prompt(1))
    assert clock.send(prompt(1)).num_owed == 40


# ------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_the_line_is_learned_on_machines_of_any_speed(scale: float) -> None:
    expectation, rng = TtftEstimator(64), random.Random(1)
    for _ in range(300):
        load = ReplicaLoad(rng.randrange(1, 4000), rng.randrange(40))
        seconds = scale * (0.02 + 5e-4 * load.num_owed + 3e-3 * load.num_running)
        expectation.observe_first_token(load, seconds * rng.uniform(0.9, 1.1))
    for load in (ReplicaLoad(10, 3), ReplicaLoad(2000, 0), ReplicaLoad(500, 30)):
        exact = scale * (0.02 + 5e-4 * load.num_owed + 3e-3 * load.num_running)
        assert expectation.seconds(load) == pytest.approx(exact, rel=0.1)


def test_what_is_expected_grows_with_load_whatever_was_seen() -> None:
    rng = random.Random(2)
    expectation = TtftEstimator(8)
    for _ in range(200):
        expectation.observe_first_token(ReplicaLoad(rng.randrange(3000), rng.randrange(8)), rng.expovariate(1.0))
        expectation.observe_run(rng.expovariate(0.1))
        here = expectation.seconds(ReplicaLoad(500, 4))
        assert 0 <= here <= expectation.seconds(ReplicaLoad(600, 4)) <= expectation.seconds(ReplicaLoad(600, 5))


def test_beyond_the_slots_one_waits_for_others_ends() -> None:
    expectation = TtftEstimator(4)
    expectation.observe_run(8.0)
    assert expectation.seconds(ReplicaLoad(0, 4)) - expectation.seconds(ReplicaLoad(0, 3)) >= 2.0


def test_a_stall_is_forgotten() -> None:
    expectation = TtftEstimator(64)
    for number in range(100):
        expectation.observe_first_token(ReplicaLoad(100, 0), 60.0 if number == 50 else 0.1)
    assert expectation.seconds(ReplicaLoad(100, 0)) < 0.12


# ------------------------------------------------------------------------------------------------- state


class Routing(RuleBasedStateMachine):
    """Requests that come, begin and end in any order, on replicas that die."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(size=ReplicaSize(num_slots=2, num_blocks=20, block_size=4))
        self.running: list[RoutedRequest] = []

    @rule(number=st.integers(0, 5), length=st.integers(1, 120), available=st.sets(st.sampled_from(ALL), min_size=1))
    def send(self, number: int, length: int, available: set[int]) -> None:
        sent = self.clock.send(prompt(number, length), tuple(sorted(available)))
        assert sent.replica in available
        assert 1 <= sent.num_owed <= length
        self.running.append(sent)

    @precondition(lambda self: any(not sent.has_begun for sent in self.running))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from([each for each in self.running if not each.has_begun]))
        self.clock.now += data.draw(st.floats(0, 10))
        self.clock.router.begin(sent, self.clock.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sent = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.clock.router.end(sent, self.clock.now, prompt(data.draw(st.integers(0, 5)), 50))

    @rule(number=st.sampled_from(ALL))
    def die(self, number: int) -> None:
        self.clock.router.forget(number)

    @invariant()
    def loads_are_what_runs(self) -> None:
        for number, replica in enumerate(self.clock.router._replicas):
            here = [sent for sent in self.running if sent.replica == number]
            owed = sum(sent.num_owed for sent in here if not sent.has_begun)
            assert replica.load == ReplicaLoad(owed, len(here))
            assert len(replica._blocks) <= 20


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
