"""The client of several engines, without engines: starting, routing, replacing."""

import asyncio
from collections.abc import Sequence

import pytest

from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError, ModelError
from inflight.contracts.step.block_hash import Root
from inflight.engine.fleet import Fleet
from inflight.engine.process.protocol import Failed
from tests.coroutines import run
from tests.test_engine_process import READY, ScriptedEngine


class Engines:
    """A client of engines that do what a test says."""

    def __init__(self, number: int = 2, after: Sequence[int | None] = (), delays: Sequence[float] = (0.0, 0.0)) -> None:
        self.started: list[list[ScriptedEngine]] = [[] for _ in range(number)]
        self.refuses: set[int] = set()
        self.connects = [lambda number=number: self._connect(number) for number in range(number)]
        self.after = after or [None] * number
        self.client = Fleet(self, delays, None, "round-robin", 8)  # type: ignore[arg-type]

    def forget_weights(self) -> None:
        """What `Launches` does before engines are replaced."""

    def _connect(self, number: int) -> ScriptedEngine:
        self.started[number].append(ScriptedEngine())
        if number in self.refuses:
            raise OSError("no more processes")
        return self.started[number][-1]

    async def connected(self, number: int, count: int = 1) -> ScriptedEngine:
        """The newest engine of a replica, once this number have started."""
        while len(self.started[number]) < count:
            await asyncio.sleep(0.001)
        return self.started[number][-1]

    async def load(self, number: int, count: int = 1) -> ScriptedEngine:
        """Let it be loaded."""
        (engine := await self.connected(number, count)).events.put(READY)
        while number not in self.client.sessions() or self.client.sessions()[number].connection is not engine:
            await asyncio.sleep(0.001)
        return engine

    async def dead(self, number: int, num_crashes: int = 1) -> None:
        while self.client.num_crashes_of(number) < num_crashes:
            await asyncio.sleep(0.001)


def replicas_of(engines: Engines, count: int = 8) -> set[int]:
    """Those that get requests."""
    numbers = set()
    for _ in range(count):
        with engines.client.deliver([1, 2], Root()) as delivery:
            numbers |= {number for number, each in engines.client.sessions().items() if each is delivery.session}
    return numbers


def test_the_first_that_is_loaded_takes_all_requests_until_others_are() -> None:
    async def check() -> None:
        engines = Engines(3)
        started = engines.client.start()
        assert not started.done()
        await engines.load(1)
        assert (await asyncio.wrap_future(started)).ready == READY
        assert replicas_of(engines) == {1}
        await engines.load(0)
        assert replicas_of(engines) == {0, 1}
        engines.client.stop()

    run(check())


def test_replicas_of_one_node_are_loaded_one_after_another() -> None:
    async def check() -> None:
        engines = Engines(4, after=[None, 0, None, 2])
        engines.client.start()
        await engines.connected(0)
        await engines.connected(2)
        assert not engines.started[1]
        assert not engines.started[3]
        await engines.load(0)
        await engines.load(1)
        assert not engines.started[3]
        (await engines.connected(2)).events.put(None)  # it dies while it is loaded: the next one starts all the same
        await engines.load(3)
        engines.client.stop()

    run(check())


def test_a_dead_engines_requests_end_and_others_run_on() -> None:
    async def check() -> None:
        engines = Engines(2)
        engines.client.start()
        first, _ = await engines.load(0), await engines.load(1)
        with engines.client.deliver([1], Root()) as one, engines.client.deliver([1], Root()) as other:
            assert one.session is not other.session
            on_first, on_second = (one, other) if one.session.connection is first else (other, one)
            first.events.put(None)
            with pytest.raises(EngineDeadError, match="killed by SIGTEST"):
                await on_first.read()
            assert replicas_of(engines) == {1}
            on_second.put("alive")
            assert await on_second.read() == ["alive"]
        engines.client.start()
        await engines.load(0, 2)
        assert replicas_of(engines) == {0, 1}
        assert (engines.client.num_crashes, engines.client.num_crashes_of(0)) == (1, 1)
        engines.client.stop()

    run(check())


def test_one_that_is_given_up_leaves_the_others_at_work() -> None:
    async def check() -> None:
        engines = Engines(2, delays=())
        engines.client.start()
        await engines.load(1)
        (await engines.connected(0)).events.put(None)
        await engines.dead(0)
        for _ in range(3):
            assert (await asyncio.wrap_future(engines.client.start())).ready == READY
        assert len(engines.started[0]) == 1
        engines.started[1][0].events.put(None)
        await engines.dead(1)
        with pytest.raises(EngineGivenUpError):
            engines.client.start()

    run(check())


def test_if_none_can_be_loaded_all_who_wait_learn_why() -> None:
    async def check() -> None:
        engines = Engines(2)
        started = engines.client.start()
        for number in range(2):
            (await engines.connected(number)).events.put(Failed("no such model", is_model_error=True))
            engines.started[number][0].events.put(None)
        with pytest.raises(ModelError, match="no such model"):
            await asyncio.wrap_future(started)
        with pytest.raises(EngineDeadError, match="no engine is running"), engines.client.deliver([1], Root()):
            pass

    run(check())


def test_an_engine_is_replaced_when_the_new_one_is_loaded_and_ends_with_its_last_request() -> None:
    async def check() -> None:
        engines = Engines(2)
        engines.client.start()
        old, _ = await engines.load(0), await engines.load(1)
        replacing = engines.client.replace()
        with engines.client.deliver([1], Root()) as one, engines.client.deliver([1], Root()) as other:
            kept = one if one.session.connection is old else other
            replaced = next(replacing)
            assert replicas_of(engines) == {0, 1}  # the old one, as long as the new one is not loaded
            new = await engines.load(0, 2)
            session = await asyncio.wrap_future(replaced)
            assert session is kept.session
            assert not session.is_stopped
            for _ in range(8):
                with engines.client.deliver([1], Root()) as delivery:
                    assert delivery.session.connection is not old
            kept.put("still served")
            assert await kept.read() == ["still served"]
        assert session.is_stopped
        await asyncio.to_thread(session.join)
        assert engines.client.sessions()[0].connection is new
        assert engines.client.num_crashes == 0
        engines.client.stop()

    run(check())


def test_a_new_engine_that_cannot_be_loaded_replaces_nothing() -> None:
    async def check() -> None:
        engines = Engines(1)
        engines.client.start()
        await engines.load(0)
        replaced = next(engines.client.replace())
        new = await engines.connected(0, 2)
        new.events.put(Failed("the file is cut short", is_model_error=True))
        new.events.put(None)
        with pytest.raises(ModelError, match="cut short"):
            await asyncio.wrap_future(replaced)
        assert replicas_of(engines) == {0}
        assert len(engines.started[0]) == 2
        engines.client.stop()

    run(check())


def test_an_engine_that_dies_while_it_is_replaced_is_not_started_besides() -> None:
    async def check() -> None:
        engines = Engines(1)
        engines.client.start()
        old = await engines.load(0)
        replaced = next(engines.client.replace())
        await engines.connected(0, 2)
        old.events.put(None)
        await engines.dead(0)
        started = engines.client.start()
        new = await engines.load(0, 2)
        assert (await asyncio.wrap_future(started)).connection is new
        assert await asyncio.wrap_future(replaced) is None
        assert len(engines.started[0]) == 2
        engines.client.stop()

    run(check())


def test_what_is_stopped_while_it_is_replaced_stays_stopped() -> None:
    async def check() -> None:
        engines = Engines(1)
        engines.client.start()
        await engines.load(0)
        replaced = next(engines.client.replace())
        await engines.connected(0, 2)
        for session in engines.client.stop():
            await asyncio.to_thread(session.join)
        with pytest.raises(EngineDeadError, match="was stopped"):
            await asyncio.wrap_future(replaced)
        assert not engines.client.sessions()

    run(check())
