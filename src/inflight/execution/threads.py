"""How many threads compute a step. Its bits do not depend on that."""

import os
import sys
from contextlib import suppress
from math import inf
from pathlib import Path

import torch

from inflight.execution.kernels import kernels_available

SYSTEM = Path("/")
"""Where `/proc` and `/sys` are."""


def usable_cores(system: Path = SYSTEM) -> int:
    """How many threads can compute at a time: one on each physical core on which this process may run, and no more than
    its quota of CPU time lets run all the time."""
    cpus = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    siblings = {_text(system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus}
    return max(1, int(min(len(siblings), _quota(system))))


def _quota(system: Path) -> float:
    """How many CPUs' time the control groups of this process may use: the least of all from its own up."""
    least = inf
    for line in (_text(system / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = system / "sys/fs/cgroup" / controllers  # a container often sees its own group there
        own = root / name.strip("/")
        for group in [root, *(each for each in (own, *own.parents) if each.is_relative_to(root))]:
            with suppress(ValueError, ZeroDivisionError):
                least = min(least, _limit(group, is_unified=not controllers))
    return least


def _limit(group: Path, *, is_unified: bool) -> float:
    """Of one control group, of version 2 (unified) or 1. Raises `ValueError` if its files say something else."""
    if is_unified:
        most, period = (_text(group / "cpu.max") or "max 1").split()
    else:
        most, period = (_text(group / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period"))
    return inf if most in ("max", "-1") else int(most) / int(period)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


class ComputeThreads:
    """The threads of steps.

    Args:
        number: how many; None: as many as torch has, but no more than `usable_cores()`.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number or min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self.number)

    def prepare(self, *, are_own: bool) -> None:
        """For what the calling thread does next.

        Args:
            are_own: whether our operators run on threads of ours, and torch's in a recording on the calling one alone
                (`kernels/threads.h`).
        """
        if torch.get_num_threads() != self.number:  # torch has one for each thread that calls it
            torch.set_num_threads(self.number)
        if kernels_available():
            torch.ops.inflight.use_own_threads(are_own)
