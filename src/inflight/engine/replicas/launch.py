"""Starts the replicas' processes: each on its own cores, with its share of the memory; replicas of one NUMA node share
one copy of the weights."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inflight.contracts.api.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.options import Positive, check, is_loaded_model, is_loaded_tokenizer
from inflight.contracts.api.watching import Watching
from inflight.engine.process.connection import Connection, ProcessConnection
from inflight.engine.process.protocol import Load
from inflight.engine.replicas.live_states import recording_of
from inflight.host.machine import SYSTEM, Placement, cores_of_nodes, place, usable_cores, usable_memory


def check_replicas(replicas: object, num_ranks: int = 1, system: Path = SYSTEM) -> int:
    """Return the requested number of replicas, each of `num_ranks` ranks; "auto" is `best_number`. Raises
    `ValueError`."""
    if replicas == "auto":
        return max(1, best_number(system) // num_ranks)
    if isinstance(replicas, str):
        raise ValueError(f"replicas is {replicas!r}; it must be 'auto', or an integer of at least 1")
    check("replicas", replicas, Positive)
    assert isinstance(replicas, int)
    return replicas


def best_number(system: Path = SYSTEM) -> int:
    """The fastest number of replicas here: one for each NUMA node whose cores this process may use. (Several on one
    node read the same weights several times, each for fewer sequences: docs/replicas.md.)"""
    sizes = list(map(len, cores_of_nodes(system).values()))
    return min(len(sizes), ceil(usable_cores(system) / max(sizes)))


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from inflight.text.tokenizer_files import TokenizerSource


def load_of(
    model: str | PreTrainedModel,
    tokenizer: TokenizerSource | None,
    config: EngineConfig,
    watching: Watching | None = None,
    *,
    otherwise: str = "in_process=True",
) -> Load:
    """The message that lets another process load the same model. Raises `ModelError` for an already loaded model,
    naming what else the caller can do."""
    for what, given in (("model", model), ("tokenizer", tokenizer)):
        if is_loaded_model(given) or is_loaded_tokenizer(given):
            raise ModelError(
                f"the {what} is a loaded {type(given).__name__}, which cannot be handed to the engine's process; give "
                f"its hub id or folder, or {otherwise}"
            )
    assert isinstance(model, str)
    return Load(
        _full_name(model),
        None if tokenizer is None else _full_name(os.fspath(tokenizer)),
        config,
        watching or Watching(),
    )


def _full_name(name: str) -> str:
    """A hub id unchanged; a folder as an absolute path, since the caller may change its directory before a restart."""
    name = os.path.expanduser(name)
    return os.path.abspath(name) if os.path.isdir(name) else name


class Launches:
    """Starts the processes of `number` replicas.

    Attributes:
        connects: for each replica, what starts its process.
        after: for each replica, the earlier one that must be loaded before; None: it starts at once (see `Fleet`).
    """

    def __init__(self, load: Load, number: int) -> None:
        self.connects: list[Callable[[], Connection]] = []
        self.after: list[int | None] = []
        self._weights_files: dict[int, _WeightsFile] = {}  # by node, where several replicas share one
        last_on_node: dict[int, int] = {}
        for replica, placement in enumerate(_places(number, load.config.tensor_parallel_size)):
            self.connects.append(partial(self._launch, _load_of(load, replica, placement, number), placement.node))
            self.after.append(last_on_node.get(placement.node))
            if placement.node in last_on_node:
                self._weights_files[placement.node] = _WeightsFile()
            last_on_node[placement.node] = replica

    def forget_weights(self) -> None:
        """Give the next processes new shared memory: their weights will differ."""
        self._weights_files = {node: _WeightsFile() for node in self._weights_files}

    def _launch(self, load: Load, node: int) -> Connection:
        file = self._weights_files.get(node)  # held here until the process has it
        return ProcessConnection(load if file is None else msgspec.structs.replace(load, weights_file=file.descriptor))


class _WeightsFile:
    """An in-memory file for the weights of a node's replicas; it is freed with the last process that has it open."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("inflight: weights")
            weakref.finalize(self, os.close, self.descriptor)


def _load_of(load: Load, replica: int, placement: Placement, number: int) -> Load:
    record_to, kv_events = load.watching.record_to, load.watching.kv_events
    if record_to is not None:
        record_to = recording_of(record_to, replica, number)
    watching = Watching(record_to=record_to, kv_events=kv_events and kv_events.of_replica(replica))
    config = _config_of(load.config, placement, number)
    return msgspec.structs.replace(load, config=config, watching=watching, cpus=placement.cpus)


def _places(number: int, num_ranks: int) -> list[Placement]:
    """Placements of `number` replicas. A replica's ranks are adjacent; `RankGroup` divides its cores among them."""
    parts = place(number * num_ranks)
    return [
        Placement(
            ranks[0].node,
            tuple(sorted({cpu for rank in ranks for cpu in rank.cpus})),
            min(rank.num_threads for rank in ranks),
        )
        for ranks in (parts[first : first + num_ranks] for first in range(0, len(parts), num_ranks))
    ]


def _config_of(config: EngineConfig, placement: Placement, number: int) -> EngineConfig:
    memory = config.kv_cache.memory
    if memory is None and config.kv_cache.num_blocks is None:
        memory = int(usable_memory() * CACHE_SHARE_OF_HOST / number)
    return config.replace(num_threads=config.num_threads or placement.num_threads, kv_cache_memory=memory)
