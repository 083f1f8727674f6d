"""`PoolSettings`: settings of several models. Plain data, validated at construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import options


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
