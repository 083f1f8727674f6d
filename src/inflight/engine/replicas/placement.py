"""The number of replicas: as requested, or the fastest here."""

from math import ceil
from pathlib import Path

from inflight.contracts.options import Positive, check
from inflight.host.machine import SYSTEM, cores_of_nodes, usable_cores


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
