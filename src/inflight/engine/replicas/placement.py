"""How many replicas there are: as many as a caller asks for, or as are fastest here."""

from math import ceil
from pathlib import Path

from inflight.contracts.options import Positive, check
from inflight.host.machine import SYSTEM, cores_of_nodes, usable_cores


def check_replicas(replicas: object, num_ranks: int = 1, system: Path = SYSTEM) -> int:
    """The number of replicas that a caller asks for, each of `num_ranks` ranks; "auto" is `best_number`. Raises
    `ValueError`."""
    if replicas == "auto":
        return max(1, best_number(system) // num_ranks)
    if isinstance(replicas, str):
        raise ValueError(f"replicas is {replicas!r}; it must be 'auto', or an integer of at least 1")
    check("replicas", replicas, Positive)
    assert isinstance(replicas, int)
    return replicas


def best_number(system: Path = SYSTEM) -> int:
    """How many replicas are fastest here: one for each NUMA node of which this process may use the cores. (Several on
    one node read the same weights several times, each for fewer sequences: docs/replicas.md.)"""
    sizes = list(map(len, cores_of_nodes(system).values()))
    return min(len(sizes), ceil(usable_cores(system) / max(sizes)))
