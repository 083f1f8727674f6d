"""Which cores each replica computes on. Replicas share no core while there is one for each, and none spans two NUMA
nodes: what it reads then lies in memory that is close to it."""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

from inflight.contracts.options import check_integer
from inflight.machine import SYSTEM, cores_of_nodes, usable_cores


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a replica's process runs.

    Attributes:
        node: its NUMA node.
        cpus: the CPUs that it may use: all hardware threads of its cores.
        num_threads: how many threads compute its steps, unless its options say so.
    """

    node: int
    cpus: tuple[int, ...]
    num_threads: int


def check_replicas(replicas: object, system: Path = SYSTEM) -> int:
    """The number of replicas that a caller asks for; "auto" is `best_number`. Raises `ValueError`."""
    if replicas == "auto":
        return best_number(system)
    if isinstance(replicas, str):
        raise ValueError(f"replicas is {replicas!r}; it must be 'auto', or an integer of at least 1")
    check_integer("replicas", replicas, 1)
    assert isinstance(replicas, int)
    return replicas


def best_number(system: Path = SYSTEM) -> int:
    """How many replicas are fastest here: one for each NUMA node of which this process may use the cores. (Several on
    one node read the same weights several times, each for fewer sequences: docs/performance.md.)"""
    sizes = list(map(len, cores_of_nodes(system).values()))
    return min(len(sizes), ceil(usable_cores(system) / max(sizes)))


def place(number: int, system: Path = SYSTEM) -> list[Placement]:
    """Places for so many replicas."""
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
    """Neighbouring cores for each of so many replicas; single ones, several times, if there are too few."""
    if number > len(cores):
        return [[cores[each % len(cores)]] for each in range(number)]
    bounds = [each * len(cores) // number for each in range(number + 1)] if number else []
    return [cores[first:last] for first, last in pairwise(bounds)]
