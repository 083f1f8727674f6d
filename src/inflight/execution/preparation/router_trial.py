"""Tests routers in isolation: does each give a row the same bits alone as among others?

A whole model's trial has few single-row steps, which a router whose last bit differs for one row in ten may pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.weights.experts import routers_of


@torch.inference_mode()
def routers_keep_bits(model: PreTrainedModel, run: Callable[[], object], min_rows: int) -> bool:
    """Whether the routers of a prepacked model give each row of a forward pass the same bits alone. Routers with other
    inputs than hidden states `[…, T, hidden]` are skipped.

    Args:
        run: runs the forward pass.
        min_rows: the least rows of a router.
    """
    taken: list[tuple[nn.Module, torch.Tensor]] = []

    def take(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            taken.append((router, args[0].clone()))

    hooks = [router.register_forward_pre_hook(take, with_kwargs=True) for router in routers_of(model)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return all(_keeps_bits(router, hidden_states, min_rows) for router, hidden_states in taken)


def _keeps_bits(router: nn.Module, hidden_states: torch.Tensor, min_rows: int) -> bool:
    num_rows, together = hidden_states.shape[-2], _tensors(router(hidden_states))
    sizes = (*hidden_states.shape[:-2], min_rows, -1)
    for row in range(num_rows):
        alone = _tensors(router(hidden_states.narrow(-2, row, 1).expand(sizes).contiguous()))
        for few, many in zip(alone, together, strict=True):
            if num_rows in many.shape:
                dim = many.shape.index(num_rows)
                if not torch.equal(few.narrow(dim, 0, 1), many.narrow(dim, row, 1)):
                    return False
    return True


def _tensors(given: Any) -> list[torch.Tensor]:
    """The tensors in a router's result."""
    return [each for each in (given if isinstance(given, tuple) else (given,)) if isinstance(each, torch.Tensor)]
