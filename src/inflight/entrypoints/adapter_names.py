"""`AdapterNames`: maps a front's adapter names to folders or hub repositories."""

import threading
from collections.abc import Iterator, Mapping

from inflight.contracts.api.config import NO_ADAPTERS, EngineConfig, check_adapter, full_source
from inflight.contracts.api.errors import AdapterError


class AdapterNames(Mapping[str, str]):
    """Thread-safe. Begins with the adapters of the configuration.

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
        """Return an adapter's source. Raises `AdapterError` if the name is unknown."""
        if not isinstance(name, str) or name not in self._sources:
            there_are = f"there are {', '.join(map(repr, self))}" if self._sources else "there are none"
            raise AdapterError(f"there is no adapter {name!r}; {there_are}")
        return self._sources[name]

    def check_new(self, name: str, source: str) -> str:
        """Return the source of an adapter to load. Raises `AdapterError` if the name is taken, or the engine was made
        without adapters."""
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
        """Add a name."""
        with self._lock:
            self._sources[name] = source

    def remove(self, name: str) -> str:
        """Remove a name; returns its source. Raises `AdapterError` if it is unknown."""
        with self._lock:
            source = self.source_of(name)
            del self._sources[name]
        return source
