"""The hook into `transformers`: our attention function, and its dispatch to a handler.

At every call, `transformers` looks up the attention function named in the model's configuration. Ours, "inflight",
passes each call to the handler of the running forward pass, held in a context variable, so engines in different threads
do not interfere. (A keyword argument to the model would be simpler, but some models do not forward these.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from inflight.execution.hf.model_class import encoders

AttentionHandler: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
"""Takes the calling module, query `[1, H, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]`, the model's mask and
the call's keyword arguments; returns `[1, T, H, Dv]`."""

_handler: ContextVar[AttentionHandler] = ContextVar("inflight_attention_handler")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that `transformers` calls; see `AttentionHandler` for shapes."""
    return _handler.get()(module, query, key, value, attention_mask, kwargs), None


def attention_sinks(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """The attention sinks of a call, one logit per head that joins the softmax, `[H]` float; None: it has none."""
    sinks = kwargs.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, Tensor) else None


# No mask function has this name, so models make no mask. They need none: the handler masks.
AttentionInterface.register("inflight", _attention)
MASKED = "inflight with masks"
"""The same function, whose handler gets the masks that the model makes."""
AttentionInterface.register(MASKED, _attention)
AttentionMaskInterface.register(MASKED, eager_mask)


def attention_in_use(model: PreTrainedModel) -> dict[int, str | None]:
    """The attention implementation of each configuration in a model, by the configuration's id; for
    `restore_attention`."""
    return {id(config): config._attn_implementation_internal for config in _configurations(model)}


def restore_attention(model: PreTrainedModel, in_use: dict[int, str | None]) -> None:
    """Restore a model's attention implementations, as found by `attention_in_use`."""
    for config in _configurations(model):
        config._attn_implementation_internal = in_use[id(config)]


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model that is exclusively ours."""
    for config in _configurations(model):
        config._attn_implementation_internal = name


@contextmanager
def with_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """A context in which a model that is exclusively ours has this attention implementation."""
    in_use = attention_in_use(model)
    use_attention(model, name)
    try:
        yield
    finally:
        restore_attention(model, in_use)


_found: WeakKeyDictionary[PreTrainedModel, list[PreTrainedConfig]] = WeakKeyDictionary()


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and of all modules in it, except its encoders of images and sound."""
    if model not in _found:
        apart = {module for encoder in encoders(model) for module in encoder.modules()}
        configs = (getattr(module, "config", None) for module in model.modules() if module not in apart)
        _found[model] = list({id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values())
    return _found[model]


@contextmanager
def attend_with(handler: AttentionHandler) -> Iterator[None]:
    """A context in which attention calls of models in this thread go to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
