"""`AdapterNames`: what the adapters of a front are called, and which folder or hub repository each is."""

import threading
from collections.abc import Iterator, Mapping

from inflight.contracts.config import NO_ADAPTERS, EngineConfig, check_adapter, full_source
from inflight.contracts.errors import AdapterError


class AdapterNames(Mapping[str, str]):
    """Any thread may look and change. Those that the engine opens itself are there from the start.

    Args:
        config: the engine's.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._can_grow = config.adapters is not None
        self._sources = dict(config.adapters or {})
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> str:
        return self._sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sources))

    def __len__(self) -> int:
        return len(self._sources)

    def source_of(self, name: str) -> str:
        """Where an adapter is. Raises `AdapterError` if there is none of this name."""
        if not isinstance(name, str) or name not in self._sources:
            there_are = f"there are {', '.join(map(repr, self))}" if self._sources else "there are none"
            raise AdapterError(f"there is no adapter {name!r}; {there_are}")
        return self._sources[name]

    def check_new(self, name: str, source: str) -> str:
        """The source of an adapter that is about to be loaded. Raises `AdapterError` if it cannot be: there is one of
        this name, or the engine was made without adapters."""
        if not self._can_grow:
            raise AdapterError(NO_ADAPTERS)
        try:
            check_adapter(name, source)
        except ValueError as error:
            raise AdapterError(str(error)) from error
        if name in self._sources:
            raise AdapterError(f"there is an adapter {name!r} already, {self._sources[name]}; unload it first")
        return full_source(source)

    def add(self, name: str, source: str) -> None:
        """Let an adapter be known by a name."""
        with self._lock:
            self._sources[name] = source

    def remove(self, name: str) -> str:
        """Forget a name; returns its source. Raises `AdapterError` if there is none."""
        with self._lock:
            source = self.source_of(name)
            del self._sources[name]
        return source
