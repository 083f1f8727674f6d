"""The options of an engine in one of several Ray actors."""

import secrets
from collections.abc import Mapping
from typing import Any

import ray

from inflight.contracts.config import CACHE_SHARE_OF_HOST
from inflight.contracts.params import MAX_SEED
from inflight.host.machine import usable_cores, usable_memory


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
