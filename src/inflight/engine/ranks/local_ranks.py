"""`LocalRanks`: processes of ranks 1 and up on this machine. They may start before the model is known, so that all
ranks import torch, which takes seconds, at the same time."""

from __future__ import annotations

import os
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

from inflight.contracts.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.errors import ModelError
from inflight.engine.ranks.links import ProcessLink, RankPlacement
from inflight.host.machine import place, usable_memory
from inflight.host.python_process import started

if TYPE_CHECKING:
    from inflight.execution.ranks.rank import Rank

SECONDS_TO_END = 5.0
"""Seconds that a rank may take to end before it is killed."""


class LocalRanks:
    """All ranks but rank 0. They end with this process; see `RankGroup`.

    Raises:
        ModelError: this system has no files in memory.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ModelError("tensor_parallel_size needs Linux")
        self.placements = place(size)
        self._file = os.memfd_create("inflight: ranks")
        self._lifeline, own_end = os.pipe()
        self._files: tuple[int, ...] = (own_end, self._file)
        try:
            files = (self._file, self._lifeline)
            self._processes = [started("inflight.engine.ranks", files) for _ in self.placements[1:]]
        finally:
            os.close(self._lifeline)
        self.links = [ProcessLink(each) for each in self._processes]

    def config_of_each(self, config: EngineConfig) -> EngineConfig:
        """Each has its share of the cache, and of the cores."""
        memory = config.kv_cache.memory
        if config.kv_cache.num_blocks is None:
            memory = (memory or int(usable_memory() * CACHE_SHARE_OF_HOST)) // len(self.placements)
        num_threads = config.num_threads or min(each.num_threads for each in self.placements)
        return config.replace(num_threads=num_threads, kv_cache_memory=memory)

    def place_of(self, number: int) -> RankPlacement:
        """A rank's placement and shared memory."""
        return RankPlacement(self._file, self._lifeline, self.placements[number].cpus)

    def first(self) -> Rank:
        """Rank 0."""
        from inflight.execution.ranks.rank import Rank  # with torch

        return Rank(0, len(self.placements), self._file)

    def end(self) -> None:
        """End all of them."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_END)
            except TimeoutExpired:
                process.kill()
                process.wait()


_waiting: LocalRanks | None = None


def start_early(size: int) -> None:
    """Make this process, which has no threads yet, rank 0 of this many, pinned to its own cores, and start the others.
    (Without this call, rank 0 stays unpinned.)"""
    global _waiting
    if hasattr(os, "memfd_create"):
        _waiting = LocalRanks(size)
        os.sched_setaffinity(0, _waiting.placements[0].cpus)


def local_ranks(size: int) -> LocalRanks:
    """The processes already waiting, or new ones."""
    global _waiting
    waiting, _waiting = _waiting, None
    return waiting or LocalRanks(size)
