"""Loads and unloads as they happen, with models that are none and a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from inflight.contracts.api.errors import ModelError
from inflight.server.models.load_scheduler import LoadScheduler
from inflight.server.models.pool import ModelPool, UnavailableError
from tests.coroutines import run


@dataclass
class Thing:
    """A model that is loaded."""

    name: str
    lose: Callable[[Exception], None]
    num_bytes: int = 1


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.get_running_loop().call_later(1e6, call)
        self.timers.append((self.now + seconds, call, timer))
        return timer

    def move(self, seconds: float) -> None:
        self.now += seconds
        due = [each for each in self.timers if each[0] <= self.now]
        self.timers = [each for each in self.timers if each[0] > self.now]
        for _, call, timer in due:
            if not timer.cancelled():
                call()


class Things:
    """Loads them when the test lets it."""

    def __init__(self, names: str, **limits: Any) -> None:
        self.clock = Clock()
        self.may_load = {name: asyncio.Event() for name in names}
        self.may_end = {name: asyncio.Event() for name in names}
        self.errors: dict[str, Exception] = {}
        self.log: list[str] = []
        for event in (*self.may_load.values(), *self.may_end.values()):
            event.set()
        limits = {"max_loaded": len(names)} | limits
        scheduler = LoadScheduler(dict.fromkeys(names, 1), **limits)
        self.pool: ModelPool[Thing] = ModelPool(
            {name: self._load_of(name) for name in names}, scheduler, self.clock.time, self.clock.call_later
        )

    def _load_of(self, name: str) -> Any:
        @asynccontextmanager
        async def load(lose: Callable[[Exception], None]) -> AsyncIterator[Thing]:
            self.log.append(f"load {name}")
            try:
                await self.may_load[name].wait()
            except asyncio.CancelledError:
                self.log.append(f"cancelled {name}")
                raise
            if name in self.errors:
                raise self.errors[name]
            yield Thing(name, lose)
            await self.may_end[name].wait()
            self.log.append(f"end {name}")

        return load

    async def use(self, name: str) -> None:
        """Use one for a moment."""
        with self.pool.use(name) as use:
            assert (await use.model()).name == name

    async def settled(self) -> None:
        """Return once nothing more happens by itself."""
        for _ in range(20):
            await asyncio.sleep(0)


def test_many_wait_for_one_load() -> None:
    async def check() -> None:
        things = Things("a")
        things.may_load["a"].clear()
        waiting = [asyncio.create_task(things.use("a")) for _ in range(5)]
        await things.settled()
        waiting[2].cancel()
        await things.settled()
        things.may_load["a"].set()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [each.cancelled() for each in waiting] == [False, False, True, False, False]
        assert things.log == ["load a"]
        assert things.pool.num_loads == {"a": 1}
        await things.pool.close()

    run(check())


def test_a_model_is_unloaded_when_it_was_idle_for_long_enough() -> None:
    async def check() -> None:
        things = Things("ab", idle_seconds=10.0)
        await things.use("a")
        things.clock.move(6)
        with things.pool.use("a"):
            things.clock.move(20)
            await things.settled()
            assert list(things.pool.loaded()) == ["a"]  # it is used
        await things.use("b")
        things.clock.move(9)
        await things.settled()
        assert list(things.pool.loaded()) == ["a", "b"]
        things.clock.move(1)
        await things.settled()
        assert not things.pool.loaded()
        assert things.pool.num_unloads == {"a": 1, "b": 1}
        await things.use("a")
        assert things.pool.num_loads["a"] == 2
        await things.pool.close()

    run(check())


def test_what_cannot_be_loaded_is_tried_again_later_and_not_sooner() -> None:
    async def check() -> None:
        things = Things("ab")
        things.errors["a"] = OSError("no such thing")
        together = [asyncio.create_task(things.use("a")) for _ in range(3)]
        for error in await asyncio.gather(*together, return_exceptions=True):
            assert isinstance(error, ModelError)
            assert str(error) == "no such thing"
        with pytest.raises(UnavailableError) as caught:
            await things.use("a")
        assert caught.value.seconds == 1.0
        assert things.log == ["load a"]
        await things.use("b")
        things.clock.move(1)
        del things.errors["a"]
        await things.use("a")
        assert things.pool.num_failures == {"a": 1, "b": 0}
        await things.pool.close()

    run(check())


def test_what_is_lost_is_unloaded_when_it_is_not_used_any_more() -> None:
    async def check() -> None:
        things = Things("a")
        with things.pool.use("a") as use:
            (await use.model()).lose(ValueError("dead"))
            with pytest.raises(UnavailableError, match="dead"):
                await things.use("a")
            await things.settled()
            assert things.log == ["load a"]
            things.clock.move(1)
            waiting = asyncio.create_task(things.use("a"))  # not by the one that is lost
            await things.settled()
        await waiting
        assert things.log == ["load a", "end a", "load a"]
        await things.pool.close()

    run(check())


def test_an_end_that_goes_wrong_is_an_end(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        things = Things("ab", max_loaded=1)
        await things.use("a")
        things.may_end["a"].wait = broken  # type: ignore[method-assign]
        await things.use("b")
        assert "a was not unloaded properly" in caplog.text
        await things.pool.close()

    async def broken() -> Any:
        raise KeyError("lost")

    run(check())


def test_close_ends_loads_and_models() -> None:
    async def check() -> None:
        things = Things("ab")
        things.may_load["a"].clear()
        waiting = asyncio.create_task(things.use("a"))
        await things.settled()
        await things.use("b")
        await things.pool.close()
        assert things.log == ["load a", "load b", "cancelled a", "end b"]
        assert not things.pool.loaded()
        waiting.cancel()
        await asyncio.wait({waiting})

    run(check())
