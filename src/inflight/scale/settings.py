"""`AppSettings`: settings of a Ray Serve application. Plain data, validated at construction, from Python or YAML.

The options of an engine in one of several Ray actors.
"""

import secrets
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from inflight.contracts.api.config import CACHE_SHARE_OF_HOST, EngineConfig, engine_config
from inflight.contracts.api.params import MAX_SEED
from inflight.host.machine import usable_cores, usable_memory
from inflight.server.operations.settings import OperatorSettings
from inflight.server.serving.settings import ServerSettings, names_of


def options_in_actor(engine: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options, completed for this actor.

    Threads and cache memory follow the actor's share of the machine's CPUs, so that several actors fit on one machine.
    (An actor without reserved CPUs takes all.) The `seed` is random, so that engines differ for requests without one.
    """
    options: dict[str, Any] = {"seed": secrets.randbelow(MAX_SEED)}
    given: dict[str, float] = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    num_cpus = given.get("CPU")
    if num_cpus:
        options["num_threads"] = threads_of(engine, int(num_cpus))
        if "num_blocks" not in engine:
            share = min(1.0, num_cpus / usable_cores())
            options["kv_cache_memory"] = int(usable_memory() * CACHE_SHARE_OF_HOST * share)
    return options | dict(engine)


def threads_of(engine: Mapping[str, Any], num_cpus: int) -> int:
    """An engine's number of threads on `num_cpus`: per rank, if it has several."""
    return max(1, num_cpus // int(engine.get("tensor_parallel_size", 1)))


PREFIX, LEAST_LOADED = "prefix", "least-loaded"

NOT_OF_SERVER = {"batch_dir": "replicas cannot share one; for batch jobs there is inflight.scale.data"}

NOT_OF_OPERATOR = dict.fromkeys(("log_format", "log_text"), "Serve writes the log, see the deployment's logging_config")
"""Options that an application on Ray would ignore, and why."""


class AppSettings(BaseModel):
    """The argument of `build_app`; also a mapping with these fields, as in Serve's configuration files.

    Attributes:
        model: a hub id, or a folder that every node has; None is the small embedded model.
        tokenizer: as of `AsyncLLM`.
        served_model_names: the model's name for clients, and further accepted names.
        engine: the fields of `EngineConfig`, for the engine of each replica. `num_threads`, unless given, is the
            replica's `num_cpus`, and `kv_cache_memory` its share of the machine's.
        server: the fields of `ServerSettings`, except the model's names and `batch_dir`.
        operator: the fields of `OperatorSettings`, except those of logs; `grace_period` is the time for a replica to
            finish its requests.
        deployment: options of Serve's deployment, such as `num_replicas`, `autoscaling_config` and
            `ray_actor_options`. By default a replica has all cores of the machine on which the application is built.
        routing: how requests are routed: "least-loaded" (of two random replicas), or "prefix" (by common prefixes),
            which adds one hop through a `PrefixFront`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = None
    tokenizer: str | None = None
    served_model_names: tuple[str, ...] = ()
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    operator: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    routing: str = LEAST_LOADED

    @field_validator("routing")
    @classmethod
    def _check_routing(cls, routing: str) -> str:
        if routing not in (LEAST_LOADED, PREFIX):
            raise ValueError(f"routing is {routing!r}; it must be {LEAST_LOADED!r} or {PREFIX!r}")
        return routing

    def model_post_init(self, _: object) -> None:
        """Validate options that only replicas read."""
        self.engine_config()
        self.server_settings()
        self.operator_settings()

    def engine_config(self) -> EngineConfig:
        """The options of each engine. Raises `ValueError`."""
        return engine_config(self.engine, "the application's engine")

    def server_settings(self) -> ServerSettings:
        """The server's settings. Raises `ValueError`."""
        name, *aliases = names_of(self.model, self.served_model_names)
        _refuse(self.server, NOT_OF_SERVER)
        return ServerSettings(model_name=name, model_aliases=tuple(aliases), **self.server)

    def operator_settings(self) -> OperatorSettings:
        """The operator's settings. Raises `ValueError`."""
        _refuse(self.operator, NOT_OF_OPERATOR)
        return OperatorSettings(**self.operator)


def _refuse(given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise `ValueError` for an option without effect here."""
    for name, reason in reasons.items():
        if name in given:
            raise ValueError(f"{name} is not an option on Ray: {reason}")
