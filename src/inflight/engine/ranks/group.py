"""`RankGroup`: rank 0's handle on the other ranks: runs plans on them, and ends them. If one rank ends, none can
continue: waiting ranks raise, and the others end with rank 0.

`LocalRanks`: processes of ranks 1 and up on this machine. They may start before the model is known, so that all
ranks import torch, which takes seconds, at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from queue import SimpleQueue
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

from inflight.contracts.api.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.api.errors import ModelError, RankLostError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.plan import StepPlan
from inflight.engine.ranks.links import LoadShard, Message, ProcessLink, RankFailed, RankPlacement, Ready, RunStep
from inflight.execution.ranks.rank import was_told_to_end
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


SECONDS_TO_NOTICE = 10.0
"""Seconds between a failed barrier and the link's report of how the rank ended."""
NOT_BY_ALL = "the model could not be loaded by all ranks"


class RankGroup:
    """Starts the ranks.

    Args:
        model: a hub id or a folder.
        config: of all of them together.

    Attributes:
        rank: rank 0.
        config: of each rank.

    Raises:
        ModelError: this system cannot run ranks, or one of them ended.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self._others = local_ranks(size)
        self.config = replace(self._others.config_of_each(config), device="cpu")
        self._links = self._others.links
        self._number = 0
        self._loss: str | None = None
        self._has_lost = threading.Event()
        self._is_ending = False
        self._when_lost: Callable[[RankLostError], None] = lambda error: None
        self._said: list[SimpleQueue[Message | None]] = [SimpleQueue() for _ in self._links]
        try:
            for number, link in enumerate(self._links, 1):
                try:
                    link.send(LoadShard(model, self.config, number, size, self._others.place_of(number)))
                except OSError as error:
                    raise ModelError(f"{NOT_BY_ALL}: rank {number} {link.ending()} before that") from error
            self.rank = self._others.first()
            for number in range(1, size):
                name = f"inflight: rank {number}"
                threading.Thread(target=self._listen, args=(number,), name=name, daemon=True).start()
        except BaseException:
            self.end()
            raise
        self.rank.begin(0)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A context in which rank 0 prepares its shard. Raises `ModelError` if another rank fails."""
        try:
            yield
        except Exception as error:
            if not was_told_to_end(error):
                raise
            raise ModelError(f"{NOT_BY_ALL}: {self._lost(error)}") from error

    def check(self, info: ModelInfo) -> None:
        """Wait until all ranks are prepared. Raises `ModelError` if one fails, or its findings differ from rank 0's."""
        for number, said in enumerate(self._said, 1):
            message = said.get()
            if not isinstance(message, Ready):
                self._has_lost.wait()
                raise ModelError(f"{NOT_BY_ALL}: {self._loss}")
            own, its = (asdict(each) | {"num_threads": None} for each in (info, message.info))
            differences = [f"{name} is {own[name]!r} and {its[name]!r}" for name in own if own[name] != its[name]]
            if differences:
                raise ModelError(f"ranks 0 and {number} run the model in other ways: {'; '.join(differences)}")

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """A context in which all ranks run this plan. Raises `RankLostError` if one has ended."""
        if self._loss is not None:
            raise RankLostError(self._loss)
        self._number += 1
        message = RunStep(self._number, replace(plan, assignments=()))
        try:
            for link in self._links:
                link.send(message)
        except OSError as error:
            raise self._lost(error) from error
        self.rank.begin(self._number)
        try:
            yield
        except BaseException as error:
            self.rank.give_up()
            if not isinstance(error, Exception):
                raise
            if was_told_to_end(error):
                raise self._lost(error) from error
            if self._loss is not None:
                raise RankLostError(self._loss) from error
            raise

    def _lost(self, error: Exception) -> RankLostError:
        """Translate an error caused by another rank's end."""
        self._has_lost.wait(SECONDS_TO_NOTICE)
        return RankLostError(self._loss or str(error))

    def when_lost(self, call: Callable[[RankLostError], None]) -> None:
        """Set a function to call, in another thread, when a rank ends; call it now if one has."""
        self._when_lost = call
        if self._has_lost.is_set():
            call(RankLostError(self._loss))

    def end(self) -> None:
        """End all ranks but this one."""
        self._is_ending = True
        self._others.end()

    def _listen(self, number: int) -> None:
        """Receive a rank's messages until it ends."""
        link, said = self._links[number - 1], self._said[number - 1]
        failure = ""
        while (message := link.receive()) is not None:
            if isinstance(message, RankFailed):
                failure = f": {message.message}"
            said.put(message)
        ending = link.ending()
        if not self._is_ending and self._loss is None:
            self._loss = f"rank {number} {ending}{failure}"
        self._has_lost.set()
        if not self._is_ending:  # or the exchange may be gone
            self.rank.end()
        said.put(None)
        if not self._is_ending:
            self._when_lost(RankLostError(self._loss))
