"""`ModelPool`: loads and unloads a server's models as `LoadScheduler` decides. Knows neither HTTP nor engines.

Everything runs in one event loop. Each loaded model has a task, from load to unload.

`PoolSettings`: settings of several models. Plain data, validated at construction.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from inflight.contracts.api import options
from inflight.contracts.api.errors import ModelError
from inflight.server.models.load_scheduler import Entry, LoadScheduler


@options.strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The models, and limits of how many are loaded.

    Attributes:
        models: by name: a hub id, a folder or a GGUF file; None: the embedded model.
        own_options: options of single models, by name: arguments of `AsyncLLM` and fields of `ServerSettings`,
            overriding those of all models.
        max_loaded_models: the most models loaded at once; None: all.
        max_loaded_memory: total bytes of loaded models; None: the memory free when the server starts.
        idle_unload: seconds without a request after which a model is unloaded; None: never.

    Raises:
        ValueError: there is no model, an unknown one has options, or names are not unique.
    """

    models: Mapping[str, str | None]
    own_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_loaded_models: options.Positive | None = None
    max_loaded_memory: options.Positive | None = None
    idle_unload: options.Seconds | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty; there must be at least one")
        for name in self.own_options:
            if name not in self.models:
                raise ValueError(f"there are options of {name!r}, which is none of the models")
        adapters = [adapter for own in self.own_options.values() for adapter in own.get("adapters") or ()]
        for adapter in adapters:
            if adapter in self.models or adapters.count(adapter) > 1:
                raise ValueError(f"the adapter {adapter!r} has the name of another model or adapter")

    @property
    def adapters(self) -> dict[str, str]:
        """The model of each adapter."""
        return {adapter: model for model, own in self.own_options.items() for adapter in own.get("adapters") or ()}

    @property
    def num_loaded(self) -> int:
        """The maximum number of loaded models."""
        return min(len(self.models), self.max_loaded_models or len(self.models))


logger = logging.getLogger("inflight.server")


class InMemory(Protocol):
    """A loaded model."""

    @property
    def num_bytes(self) -> int:
        """Its memory in bytes."""


M = TypeVar("M", bound=InMemory)
M_co = TypeVar("M_co", bound=InMemory, covariant=True)


class ModelLoader(Protocol[M_co]):
    """A context manager that loads a model and unloads it."""

    def __call__(self, lose: Callable[[Exception], None]) -> AbstractAsyncContextManager[M_co]:
        """The model calls `lose` when it becomes unusable."""


class UnavailableError(ModelError):
    """A failed load is not retried before a delay.

    Attributes:
        seconds: the delay.
    """

    def __init__(self, error: Exception, seconds: float) -> None:
        super().__init__(str(error))
        self.seconds = seconds


class Use(Generic[M]):
    """A request's use of a model, which is not unloaded before the block ends.

    Attributes:
        name: the model's.
    """

    def __init__(self, pool: "ModelPool[M]", name: str) -> None:
        self.name = name
        self._pool = pool
        self._ticket: int | None = None
        self._admitted: asyncio.Future[M] = asyncio.get_running_loop().create_future()

    @property
    def is_admitted(self) -> bool:
        """Whether the model is usable, or its load failed: `model` returns at once."""
        return self._admitted.done()

    async def model(self) -> M:
        """Wait for the model to be loaded and for this request's turn. Raises the load's error."""
        return await asyncio.shield(self._admitted)  # others may wait for the same future

    def __enter__(self) -> Self:
        self._ticket = self._pool._join(self.name, self._admitted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._ticket is not None
        self._pool._leave(self._ticket)
        if self._admitted.done() and not self._admitted.cancelled():
            self._admitted.exception()  # mark the exception as retrieved


class ModelPool(Generic[M]):
    """The models of a server.

    Args:
        loads: for each model, its loader.
        clock: returns seconds.
        call_later: calls a function after this many seconds, unless cancelled; None: the event loop's.
        adapters: the model of each adapter, whose name requests may use.

    Attributes:
        adapters: the model of each.
        num_loads, num_failures, num_unloads: loads, failed loads and unloads of each model.
        load_seconds: for each model, the duration of its last load.
    """

    def __init__(
        self,
        loads: Mapping[str, ModelLoader[M]],
        scheduler: LoadScheduler,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.num_loads, self.num_failures, self.num_unloads = (dict.fromkeys(loads, 0) for _ in range(3))
        self.load_seconds: dict[str, float] = {}
        self.adapters: Mapping[str, str] = adapters or {}
        self._loads, self._scheduler = loads, scheduler
        self._clock, self._call_later = clock, call_later
        self._waiting: dict[int, asyncio.Future[M]] = {}
        self._models: dict[str, M] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __contains__(self, name: object) -> bool:
        return name in self._loads

    def entry(self, name: str) -> Entry:
        """A model's entry."""
        return self._scheduler[name]

    def loaded(self) -> dict[str, M]:
        """The loaded models, by name."""
        return dict(self._models)

    def use(self, name: str) -> Use[M]:
        """A use of a model, for a `with` block. Entering it raises `UnavailableError`."""
        return Use(self, name)

    async def close(self) -> None:
        """Unload everything. Requests that still wait for a model are never admitted."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for name, life in self._lives.items():
            if self._scheduler[name].state == "loading":
                life.cancel()
            self._ends[name].set()
        if self._lives:
            await asyncio.wait(list(self._lives.values()))

    # ------------------------------------------------------------------------------------- uses

    def _join(self, name: str, admitted: "asyncio.Future[M]") -> int:
        now = self._clock()
        failure = self._scheduler.failure(name, now)
        if failure is not None:
            raise UnavailableError(failure.error, failure.retry_time - now)
        ticket = self._scheduler.ask(name)
        self._waiting[ticket] = admitted
        self._decide()
        return ticket

    def _leave(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)
        self._scheduler.leave(ticket, self._clock())
        self._decide()

    # ------------------------------------------------------------------------------------- decisions

    def _decide(self) -> None:
        if self._is_closed:
            return
        decision = self._scheduler.decide(self._clock())
        for ticket in decision.admitted:
            self._waiting.pop(ticket).set_result(self._models[self._scheduler.model_of(ticket)])
        for name in decision.load:
            self._ends[name] = asyncio.Event()
            self._lives[name] = asyncio.create_task(self._live(name), context=Context())  # no request's
        for name in decision.unload:
            self._ends[name].set()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._scheduler.next_time()
        if when is not None:
            call_later = self._call_later or asyncio.get_running_loop().call_later
            self._timer = call_later(max(0.0, when - self._clock()), self._decide)

    async def _live(self, name: str) -> None:
        """One model, from load to unload."""
        try:
            start_time = time.monotonic()
            async with self._loads[name](lambda error: self._lose(name, error)) as model:
                self.num_loads[name] += 1
                self.load_seconds[name] = time.monotonic() - start_time
                logger.info("%s was loaded in %.1f s", name, self.load_seconds[name])
                self._models[name] = model
                self._scheduler.loaded(name, model.num_bytes, self._clock())
                self._decide()
                await self._ends[name].wait()
                del self._models[name]
                logger.info("unloading %s", name)
        except Exception as error:
            if self._scheduler[name].state == "loading":
                self._fail(name, error)
            else:
                logger.exception("%s was not unloaded properly", name)
        finally:
            self._models.pop(name, None)
            del self._lives[name], self._ends[name]
        if self._scheduler[name].state == "unloading":
            self.num_unloads[name] += 1
            self._scheduler.unloaded(name)
        self._decide()

    def _fail(self, name: str, error: Exception) -> None:
        logger.error("%s cannot be loaded: %s", name, error)
        self.num_failures[name] += 1
        told = error if isinstance(error, ModelError) else ModelError(str(error))
        for ticket in self._scheduler.failed(name, told, self._clock()):
            self._waiting.pop(ticket).set_exception(told)

    def _lose(self, name: str, error: Exception) -> None:
        logger.error("%s is lost; the next request for it loads it again: %s", name, error)
        self._scheduler.lost(name, error, self._clock())
        self._decide()
