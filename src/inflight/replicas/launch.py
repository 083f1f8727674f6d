"""How the engines' processes of replicas are started: each on its own cores, with its share of the memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from inflight.contracts.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.engine.process.connection import Connection, ProcessConnection
from inflight.engine.process.protocol import Load
from inflight.machine import usable_memory
from inflight.replicas.placement import Placement, place


def launches(load: Load, number: int) -> tuple[list[Callable[[], Connection]], list[int | None]]:
    """For each of so many replicas, what starts its process, and which one must be loaded before (see `Fleet`)."""
    if number == 1:
        return [lambda: ProcessConnection(load)], [None]
    connects: list[Callable[[], Connection]] = []
    after: list[int | None] = []
    last_on_node: dict[int, int] = {}
    for replica, placement in enumerate(place(number)):
        connects.append(_launch(_load_of(load, replica, placement, number)))
        after.append(last_on_node.get(placement.node))
        last_on_node[placement.node] = replica
    return connects, after


def _launch(load: Load) -> Callable[[], Connection]:
    return lambda: ProcessConnection(load)


def _load_of(load: Load, replica: int, placement: Placement, number: int) -> Load:
    record_to = load.record_to
    if record_to is not None:
        path = Path(record_to.path)
        record_to = replace(record_to, path=str(path.with_name(f"{path.stem}-{replica}{path.suffix}")))
    config = _config_of(load.config, placement, number)
    return msgspec.structs.replace(load, config=config, record_to=record_to, cpus=placement.cpus)


def _config_of(config: EngineConfig, placement: Placement, number: int) -> EngineConfig:
    memory = config.kv_cache_memory
    if memory is None and config.num_blocks is None:
        memory = int(usable_memory() * CACHE_SHARE_OF_HOST / number)
    return replace(config, num_threads=config.num_threads or placement.num_threads, kv_cache_memory=memory)
