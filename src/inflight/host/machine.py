"""The resources of this process: physical cores, NUMA nodes and memory; and their partition among processes."""

import os
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

SYSTEM = Path("/")
"""The folder that contains `/proc` and `/sys`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one of several processes.

    Attributes:
        node: its NUMA node.
        cpus: its CPUs: all hardware threads of its cores.
        num_threads: its compute threads, unless configured.
    """

    node: int
    cpus: tuple[int, ...]
    num_threads: int


def usable_cores(system: Path = SYSTEM) -> int:
    """The number of useful compute threads: one per usable physical core, limited by the CPU quota."""
    return max(1, int(min(sum(map(len, cores_of_nodes(system).values())), _quota(system))))


def cores_of_nodes(system: Path = SYSTEM) -> dict[int, list[list[int]]]:
    """This process's physical cores by NUMA node, each as its CPUs (hardware threads)."""
    cpus = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    cores: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for cpu in sorted(cpus):
        folder = system / f"sys/devices/system/cpu/cpu{cpu}"
        cores[_node(folder), _text(folder / "topology/thread_siblings_list") or str(cpu)].append(cpu)
    nodes: defaultdict[int, list[list[int]]] = defaultdict(list)
    for (node, _), siblings in cores.items():
        nodes[node].append(siblings)
    return dict(sorted(nodes.items()))


def usable_memory(system: Path = SYSTEM) -> int:
    """Bytes of memory that this process may use: the machine's or the container's."""
    memory = 8 * 2**30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _text(system / "sys/fs/cgroup/memory.max") or ""
    return min(memory, int(limit)) if limit.isdigit() else memory


def free_memory(system: Path = SYSTEM) -> int:
    """Bytes of usable memory that are free; all, where unknown."""
    usable = free = usable_memory(system)
    for line in (_text(system / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) * 1024)
    group = system / "sys/fs/cgroup"
    if (_text(group / "memory.max") or "").isdigit() and (_text(group / "memory.current") or "").isdigit():
        statistics = dict(line.split() for line in (_text(group / "memory.stat") or "").splitlines())
        cached = int(statistics.get("inactive_file", 0))  # page cache, reclaimable
        free = min(free, usable - int(_text(group / "memory.current") or 0) + cached)
    return max(0, free)


def resident_bytes(system: Path = SYSTEM) -> int:
    """Resident bytes of this process; 0 where unknown."""
    pages = (_text(system / "proc/self/statm") or "").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def place(number: int, system: Path = SYSTEM) -> list[Placement]:
    """Placements of `number` processes. They share no core while there is one for each, and none spans NUMA nodes, so
    that their memory is local."""
    nodes = cores_of_nodes(system)
    on_node = dict.fromkeys(nodes, int(number >= len(nodes)))
    for _ in range(number - sum(on_node.values())):
        on_node[min(nodes, key=lambda node: (on_node[node] + 1) / len(nodes[node]))] += 1
    most_threads = max(1, usable_cores(system) // number)
    return [
        Placement(node, tuple(sorted(cpu for core in cores for cpu in core)), min(len(cores), most_threads))
        for node in nodes
        for cores in _shares(nodes[node], on_node[node])
    ]


def _shares(cores: list[list[int]], number: int) -> list[list[list[int]]]:
    """Adjacent cores for each of `number` processes; repeated single ones if there are too few."""
    if number > len(cores):
        return [[cores[each % len(cores)]] for each in range(number)]
    bounds = [each * len(cores) // number for each in range(number + 1)] if number else []
    return [cores[first:last] for first, last in pairwise(bounds)]


def _node(folder: Path) -> int:
    """The NUMA node of a CPU; 0 where the system knows none."""
    nodes = (each.name.removeprefix("node") for each in folder.glob("node*"))
    return next((int(node) for node in nodes if node.isdecimal()), 0)


def _quota(system: Path) -> float:
    """The CPU quota of this process's control groups: the least of all from its own up."""
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
