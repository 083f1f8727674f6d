"""Our C++ kernels for the CPU: operators `torch.ops.inflight.*` (`operators.cpp`), if `kernels_available()`."""

import functools
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable

import torch

from inflight.execution.kernels.building import SOURCES
from inflight.execution.kernels.library import cache_folder, load_library

__all__ = [
    "PANEL_OUTPUTS",
    "SOURCES",
    "cache_folder",
    "delete_with",
    "has_panels",
    "kernels_available",
    "kernels_in_use",
]

logger = logging.getLogger(__name__)

PANEL_OUTPUTS = 32
"""Outputs per panel, in all kernels."""


@functools.cache
def kernels_in_use() -> str | None:
    """The loaded kernels: "native", built for this CPU, or a name of `building.TARGETS` for the package's; None: none.
    The first call loads or builds them, and warns on failure."""
    if sys.platform != "linux":
        return None
    try:
        kernels = load_library()
        _describe_operators()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = str(error).strip().split("\n")
        reason = next((line for line in lines if " error: " in line), lines[0])  # the compiler's
        logger.warning(
            "the CPU kernels are not available (%s); attention runs through torch's operators, slower", reason
        )
        return None
    return kernels


@functools.cache
def kernels_available() -> bool:
    """Whether `torch.ops.inflight` exists."""
    return kernels_in_use() is not None


def has_panels(dtype: torch.dtype) -> bool:
    """Whether our linear layers support weights stored in `dtype` on this CPU."""
    return kernels_available() and bool(torch.ops.inflight.has_panels(dtype))


def delete_with(owner: object, operator: Callable[[int], None], number: int) -> None:
    """Call an operator with a kernels' handle once its owner is collected."""
    weakref.finalize(owner, _call_unseen, operator, number)


def _call_unseen(operator: Callable[[int], None], number: int) -> None:
    """The garbage collector may run during a traced or data-less forward pass."""
    with torch._C._DisableTorchDispatch():
        operator(number)


def _describe_operators() -> None:
    """Register meta implementations of our operators."""

    def linear(x: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    def write(key: torch.Tensor, value: torch.Tensor, call: int) -> None:
        return None

    def attend(query: torch.Tensor, sinks: torch.Tensor | None, call: int, value_head_size: int) -> torch.Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value_head_size)

    def place_rows(states: torch.Tensor, placing: int) -> None:
        return None

    def convolve(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, mixer: int
    ) -> torch.Tensor:
        return x.new_empty(x.shape)

    def recur(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        skip: torch.Tensor | None,
        rates: torch.Tensor | None,
        is_delta: bool,
        normalizes: bool,
        scale: float,
        dtype: torch.dtype,
        mixer: int,
    ) -> torch.Tensor:
        return value.new_empty(value.shape, dtype=dtype)

    def activate(x: torch.Tensor, activation: str, variant: str) -> torch.Tensor:
        return x.new_empty(x.shape)

    def experts(x: torch.Tensor, chosen: torch.Tensor, number: int) -> torch.Tensor:
        return x.new_empty(chosen.shape[0] * chosen.shape[1], x.shape[1])

    def experts_part(x: torch.Tensor, chosen: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
        return x.new_empty(chosen.shape[0] * chosen.shape[1], out_features)

    def adapted_rows(rows: torch.Tensor, ids: torch.Tensor, step: int, place: int) -> torch.Tensor:
        return rows.new_empty(rows.shape)

    def weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(weights.shape[0], rows.shape[1])

    def sum_of_ranks(rows: torch.Tensor, exchange: int) -> torch.Tensor:
        return rows.new_empty(rows.shape)

    def gather_of_ranks(rows: torch.Tensor, exchange: int, num_ranks: int) -> torch.Tensor:
        return rows.new_empty(*rows.shape[:-1], num_ranks * rows.shape[-1])

    def grouped_rows(
        layout: list[int],
        panels: torch.Tensor,
        rows: torch.Tensor,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return panels.new_empty(rows.shape[0], in_features, dtype=dtype)

    torch.library.register_fake("inflight::linear", linear)
    torch.library.register_fake("inflight::grouped_rows", grouped_rows)
    torch.library.register_fake("inflight::experts", experts)
    torch.library.register_fake("inflight::experts_up", experts_part)
    torch.library.register_fake("inflight::experts_down", experts_part)
    torch.library.register_fake("inflight::adapted_rows", adapted_rows)
    torch.library.register_fake("inflight::weighted_sum", weighted_sum)
    torch.library.register_fake("inflight::sum_of_ranks", sum_of_ranks)
    torch.library.register_fake("inflight::gather_of_ranks", gather_of_ranks)
    torch.library.register_fake("inflight::write", write)
    torch.library.register_fake("inflight::attend", attend)
    torch.library.register_fake("inflight::place_rows", place_rows)
    torch.library.register_fake("inflight::activate", activate)
    torch.library.register_fake("inflight::convolve", convolve)
    torch.library.register_fake("inflight::recur", recur)
