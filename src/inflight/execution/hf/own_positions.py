"""Gives positions to models whose `forward` takes none (BART and its kin): their position embeddings take them, and are
given those of the running forward pass, held in a context variable, in place of the model's own."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.hf.model_call import forward_parameters

NAME = "position_ids"

_positions: ContextVar[torch.Tensor | None] = ContextVar("inflight_positions", default=None)
_HOOKED = "_inflight_positions"


def hook_positions(model: PreTrainedModel) -> bool:
    """Replace the `forward` of a model's position embeddings, once for each class, unless the model's takes positions.
    Returns whether it can be given positions. Without `at_positions` it does as before."""
    if NAME in forward_parameters(model):
        return True
    kinds: set[Any] = {type(module) for module in model.modules() if hasattr(module, "weight")}
    embeddings = [each for each in kinds if NAME in inspect.signature(each.forward).parameters]
    for each in embeddings:
        if not hasattr(each.forward, _HOOKED):
            each.forward = _hooked(each.forward)
    return bool(embeddings)


def _hooked(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        positions, given = _positions.get(), kwargs.get(NAME)
        if positions is not None and given is not None:
            kwargs[NAME] = positions.view(given.shape)
        return forward(*args, **kwargs)

    setattr(call, _HOOKED, True)
    return call


@contextmanager
def at_positions(positions: torch.Tensor) -> Iterator[None]:
    """A context for a forward pass of a hooked model in this thread, over tokens at these positions `[T]` int64."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)
