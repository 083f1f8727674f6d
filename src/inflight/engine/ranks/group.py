"""`RankGroup`: the other ranks of a model as rank 0 has them: their processes, their steps, their ends.

If one rank ends, none can go on: those that wait for it raise, and the others end with rank 0.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from subprocess import Popen

from inflight.contracts.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.errors import ModelError, RankLostError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import StepPlan
from inflight.engine.python_process import ending
from inflight.engine.ranks.messages import Failed, Message, Part, Prepared, Step, read_message, to_frame
from inflight.engine.ranks.processes import rank_processes
from inflight.execution.ranks.rank import Rank, has_heard_of_an_end
from inflight.machine import Placement, usable_memory


class RankGroup:
    """Starts ranks 1 and up, each on cores of its own.

    Args:
        model: a hub id or a folder.
        config: of all of them together.

    Attributes:
        rank: rank 0.
        config: of each rank.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self._started = rank_processes(size)
        self.config = _config_of_rank(config, self._started.placements)
        self._number = 0
        self._loss: str | None = None
        self._has_lost = threading.Event()
        self._is_ending = False
        self._when_lost: Callable[[RankLostError], None] = lambda error: None
        self._said: list[SimpleQueue[Message | None]] = [SimpleQueue() for _ in self._started.processes]
        file, lifeline = self._started.file, self._started.lifeline
        try:
            self.rank = Rank(0, size, file)
            for number, process in enumerate(self._started.processes, 1):
                cpus = self._started.placements[number].cpus
                threading.Thread(
                    target=self._listen, args=(number,), name=f"inflight: rank {number}", daemon=True
                ).start()
                self._send(process, Part(model, self.config, number, size, cpus, file, lifeline))
        except BaseException:
            self.end()
            raise
        self.rank.begin(0)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, rank 0 prepares its part. Raises `ModelError` if another rank cannot prepare its own."""
        try:
            yield
        except Exception as error:
            if not has_heard_of_an_end(error):
                raise
            self._has_lost.wait()
            raise ModelError(f"the model could not be loaded by all ranks: {self._loss}") from error

    def check(self, info: ModelInfo) -> None:
        """Wait until all ranks are prepared. Raises `ModelError` if one is not, or has found out other things about the
        model than rank 0."""
        for number, said in enumerate(self._said, 1):
            message = said.get()
            if not isinstance(message, Prepared):
                self._has_lost.wait()
                raise ModelError(f"the model could not be loaded by all ranks: {self._loss}")
            if message.info != info:
                raise ModelError(f"ranks 0 and {number} have not prepared the same model: {info}, {message.info}")

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Inside, rank 0 runs this plan; the others do, too. Raises `RankLostError` if one of them has ended."""
        self._number += 1
        message = Step(self._number, replace(plan, assignments=()))
        for process in self._started.processes:
            self._send(process, message)
        self.rank.begin(self._number)
        try:
            yield
        except BaseException as error:
            self.rank.give_up()
            if self._loss is None or not isinstance(error, Exception):
                raise
            raise RankLostError(self._loss) from error

    def when_lost(self, call: Callable[[RankLostError], None]) -> None:
        """Call this, in another thread, when one of the ranks ends; or now, if one has."""
        self._when_lost = call
        if self._has_lost.is_set():
            call(RankLostError(self._loss))

    def end(self) -> None:
        """End all ranks but this one."""
        self._is_ending = True
        self._started.end()

    def _send(self, process: "Popen[bytes]", message: Message) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(to_frame(message))
            process.stdin.flush()
        except OSError as error:
            self._has_lost.wait()  # its end has been noticed, or is about to be
            raise RankLostError(self._loss) from error

    def _listen(self, number: int) -> None:
        """Take in what a rank says, and at last that it has ended."""
        process, said = self._started.processes[number - 1], self._said[number - 1]
        assert process.stdout is not None
        failure = ""
        while (message := read_message(process.stdout)) is not None:
            if isinstance(message, Failed):
                failure = f": {message.message}"
            said.put(message)
        code = process.wait()
        if not self._is_ending and self._loss is None:
            self._loss = f"rank {number} {ending(code)}{failure}"
        self._has_lost.set()
        self.rank.end()
        said.put(None)
        if not self._is_ending:
            self._when_lost(RankLostError(self._loss))


def _config_of_rank(config: EngineConfig, placements: list[Placement]) -> EngineConfig:
    """Of each rank: it has its share of the cache."""
    memory = config.kv_cache_memory
    if config.num_blocks is None:
        memory = (memory or int(usable_memory() * CACHE_SHARE_OF_HOST)) // len(placements)
    num_threads = config.num_threads or min(each.num_threads for each in placements)
    return replace(config, device="cpu", num_threads=num_threads, kv_cache_memory=memory)
