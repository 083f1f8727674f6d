"""The seam into `transformers`: one attention function, and how it finds out whom to call.

`transformers` looks its attention function up by the name in a model's configuration, at every call. Inside
`attend_with` that name is ours and our function hands each call to the given handler; outside, the model is as it was,
so a model that belongs to the caller stays usable. The handler is kept in a context variable: engines in different
threads never meet. (Keyword arguments to the model would be simpler, but some models do not pass them on.)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

AttentionHandler: TypeAlias = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]], torch.Tensor
]
"""Takes the calling module, query `[1, H, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]`, the model's mask and
its keyword arguments; returns `[1, T, H, Dv]`."""

_handler: ContextVar[AttentionHandler] = ContextVar("inflight_attention_handler")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return _handler.get()(module, query, key, value, attention_mask, kwargs), None


# No mask function is registered for the name, so that a model makes no mask: the handler knows who may see what.
AttentionInterface.register("inflight", _attention)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let `model` run with another attention implementation, and put back the one that it had."""
    configs = {id(config): config for config in _configs(model)}.values()
    before = [config._attn_implementation_internal for config in configs]
    with model.__dict__.setdefault("_inflight_lock", threading.RLock()):
        try:
            for config in configs:
                config._attn_implementation_internal = name
            yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation


@contextmanager
def attend_with(model: PreTrainedModel, handler: AttentionHandler) -> Iterator[None]:
    """Inside, every attention call of `model` in this thread goes to `handler`."""
    token = _handler.set(handler)
    try:
        with attention_implementation(model, "inflight"):
            yield
    finally:
        _handler.reset(token)


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config
