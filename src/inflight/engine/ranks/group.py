"""`RankGroup`: rank 0's handle on the other ranks: runs plans on them, and ends them. If one rank ends, none can
continue: waiting ranks raise, and the others end with rank 0.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from queue import SimpleQueue

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError, RankLostError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import StepPlan
from inflight.engine.ranks.links import LoadShard, Message, RankFailed, Ready, RunStep
from inflight.engine.ranks.local_ranks import local_ranks
from inflight.execution.ranks.rank import was_told_to_end

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
