"""The hook into `transformers`: our attention function, and how it finds the handler of a call.

At every call, `transformers` looks its attention function up by the name in the model's configuration. Ours is called
"inflight" and passes each call to the handler of the running forward pass. A context variable holds that handler, so
engines in different threads never meet. (A keyword argument to the model would be simpler, but some models do not pass
these on.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

AttentionHandler: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
"""Takes the calling module, query `[1, H, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]`, the model's mask and
the call's keyword arguments; returns `[1, T, H, Dv]`."""

_handler: ContextVar[AttentionHandler] = ContextVar("inflight_attention_handler")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return _handler.get()(module, query, key, value, attention_mask, kwargs), None


def attention_sinks(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """The attention sinks of a call, one logit per head that joins the softmax, `[H]`; None: it has none."""
    sinks = kwargs.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, Tensor) else None


# No mask function has this name, so models make no mask. They need none: the handler knows who may see what.
AttentionInterface.register("inflight", _attention)


def attention_in_use(model: PreTrainedModel) -> dict[int, str | None]:
    """The attention implementation of each configuration in a model, by the configuration's id; for
    `restore_attention`."""
    return {id(config): config._attn_implementation_internal for config in _configurations(model)}


def restore_attention(model: PreTrainedModel, in_use: dict[int, str | None]) -> None:
    """Give a model the attention implementations back that `attention_in_use` found."""
    for config in _configurations(model):
        config._attn_implementation_internal = in_use[id(config)]


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Let a model that is ours alone run with the attention implementation of this name from now on."""
    for config in _configurations(model):
        config._attn_implementation_internal = name


def _configurations(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """The configurations of a model and of all modules in it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config


@contextmanager
def attend_with(handler: AttentionHandler) -> Iterator[None]:
    """Inside, the attention calls of models in this thread go to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
