"""`PoolSettings`: every choice about several models. Plain data, checked when created."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import options


@options.strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Which models there are, and how many of them are in memory.

    Attributes:
        models: what each name stands for: a hub id, a folder or a GGUF file; None is the embedded model.
        own_options: of single models, by their names: what `AsyncLLM` takes, and fields of `ServerSettings`. They win
            over those of all models.
        max_loaded_models: the most that are loaded at once; None: all.
        max_loaded_memory: bytes that the loaded ones may take together; None: what is free when the server starts.
        idle_unload: seconds without a request after which a model is unloaded; None: never.
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
        """How many models may be loaded at once."""
        return min(len(self.models), self.max_loaded_models or len(self.models))
