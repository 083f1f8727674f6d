"""The processes of ranks 1 and up. They may be started before anything is known of the model: all import torch, which
takes seconds, and so they do it at the same time."""

import os
from subprocess import TimeoutExpired

from inflight.contracts.errors import ModelError
from inflight.engine.python_process import started
from inflight.machine import place

SECONDS_TO_END = 5.0
"""How long a rank that was told to end may take before it is killed."""


class RankProcesses:
    """All but rank 0. They end with this process.

    Attributes:
        placements: where each rank runs, rank 0 included.
        file: the descriptor of the file in memory through which they meet, here and there.
        lifeline: the descriptor of a pipe that ends with this process, there.

    Raises:
        ModelError: this system has no files in memory.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ModelError("tensor_parallel_size needs Linux")
        self.placements = place(size)
        self.file = os.memfd_create("inflight: ranks")
        self.lifeline, own_end = os.pipe()
        self._files: tuple[int, ...] = (own_end, self.file)
        try:
            files = (self.file, self.lifeline)
            self.processes = [started("inflight.engine.ranks", files) for _ in self.placements[1:]]
        finally:
            os.close(self.lifeline)

    def end(self) -> None:
        """End all of them."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)
        for process in self.processes:
            try:
                process.wait(SECONDS_TO_END)
            except TimeoutExpired:
                process.kill()
                process.wait()


_waiting: RankProcesses | None = None


def start_early(size: int) -> None:
    """Let this process, which has no threads yet, be rank 0 of so many, and run on cores of its own; start the others.
    (Where nobody has said so, rank 0 runs where it did.)"""
    global _waiting
    if hasattr(os, "memfd_create"):
        _waiting = RankProcesses(size)
        os.sched_setaffinity(0, _waiting.placements[0].cpus)


def rank_processes(size: int) -> RankProcesses:
    """Those that wait already, or new ones."""
    global _waiting
    waiting, _waiting = _waiting, None
    return waiting or RankProcesses(size)
