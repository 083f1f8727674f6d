"""`NetworkRank`: a rank that meets the others over a network, by torch's gloo.

Its sums are added in the same order, and are the same bits, as those of ranks on one machine.
"""

from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore  # as torch.distributed has them

from inflight.execution.kernels import delete_with
from inflight.execution.ranks.rank import AN_END, Rank

LONGEST_WAIT = timedelta(minutes=10)
"""For another rank, which may be loading its part."""
_groups: dict[int, ProcessGroupGloo] = {}
_numbers = count()


class NetworkRank(Rank):
    """One of the ranks.

    Args:
        store: where they find each other.
        host: the name or address of this machine for the others.
    """

    def __init__(self, number: int, size: int, store: TCPStore, host: str) -> None:
        super().__init__(number, size)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = LONGEST_WAIT
        self._group = next(_numbers)
        self._is_over = False
        _groups[self._group] = ProcessGroupGloo(store, number, size, options)
        delete_with(self, _groups.__delitem__, self._group)

    def begin(self, step: int) -> None:
        pass  # whoever is behind is waited for

    def give_up(self) -> None:
        self.end()  # nobody can be called back from a meeting

    @property
    def is_given_up(self) -> bool:
        return False

    @property
    def can_go_on(self) -> bool:
        return not self._is_over

    def end(self) -> None:
        self._is_over = True  # whoever waits for a rank that has ended hears of it from gloo

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _sum_over_network(rows, self._group)
        return summed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = _gather_over_network(rows, self._group, self.size)
        return gathered


@torch.library.custom_op("inflight::sum_over_network", mutates_args=())
def _sum_over_network(rows: torch.Tensor, group: int) -> torch.Tensor:
    first, *others = _of_all(rows, group)
    summed = first.float()
    for each in others:
        summed += each
    return summed.to(rows.dtype)


@torch.library.custom_op("inflight::gather_over_network", mutates_args=())
def _gather_over_network(rows: torch.Tensor, group: int, size: int) -> torch.Tensor:
    return torch.cat(_of_all(rows, group), dim=-1)


def _of_all(rows: torch.Tensor, group: int) -> list[torch.Tensor]:
    """What all ranks have, in their order. Raises `RuntimeError` if one has ended."""
    own = rows.contiguous()
    found: Any = _groups[group]
    given = [torch.empty_like(own) for _ in range(found.size())]
    if own.numel() == 0:
        return given
    try:
        found.allgather([given], [own]).wait()
    except RuntimeError as error:
        raise RuntimeError(f"{AN_END}: {error}") from error
    return given


def _shape_of_sum(rows: torch.Tensor, group: int) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _shape_of_gathered(rows: torch.Tensor, group: int, size: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], size * rows.shape[-1])


_sum_over_network.register_fake(_shape_of_sum)
_gather_over_network.register_fake(_shape_of_gathered)
