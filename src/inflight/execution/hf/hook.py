"""The seam into `transformers`: one attention function, and how it finds out whom to call.

`transformers` looks its attention function up by the name in a model's configuration, at every call. Ours is
registered under the name "inflight" and hands each call to the handler of the running forward pass, which a context
variable holds: engines in different threads never meet. (Keyword arguments to the model would be simpler, but some
models do not pass them on.) In a compiled model there is no handler to ask: under the name "inflight_compiled" a call
goes to the kernel at once, with the number of its cache, which is attached to its module.
"""

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


def _compiled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    sinks = attention_sinks(module, kwargs)
    sinks = None if sinks is None else sinks.float()
    return torch.ops.inflight.write_and_attend(query, key, value, sinks, module.inflight_call)[None], None


def attention_sinks(module: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The per-head logits `[H]` that join this call's softmax, if it has any."""
    sinks = kwargs.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, torch.Tensor) else None


# No mask function is registered for the names, so that a model makes no mask: it is known here who may see what.
AttentionInterface.register("inflight", _attention)
AttentionInterface.register("inflight_compiled", _compiled_attention)


def attention_in_use(model: PreTrainedModel) -> dict[int, str | None]:
    """The attention implementation of each configuration in a model, to be restored."""
    return {id(config): config._attn_implementation_internal for config in _configurations(model)}


def restore_attention(model: PreTrainedModel, in_use: dict[int, str | None]) -> None:
    """Let a model run with the attention implementations that it had."""
    for config in _configurations(model):
        config._attn_implementation_internal = in_use[id(config)]


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Let a model that is ours alone run with another attention implementation from now on."""
    for config in _configurations(model):
        config._attn_implementation_internal = name


def _configurations(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Of a model and all modules in it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config


@contextmanager
def attend_with(handler: AttentionHandler) -> Iterator[None]:
    """Inside, the attention calls that a model makes in this thread go to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
