"""The hook into `transformers` for what mixes tokens besides attention.

Models call such functions by name in their modules, where `transformers` would put kernels of other packages. Ours
replace them there: each passes its call to the handler of the running forward pass, if there is one, held in a context
variable like attention's.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel

from inflight.execution.mixing import MixingBackend, Operators, mix
from inflight.execution.mixing.elementwise import BatchInvariantElementwise
from inflight.execution.mixing.functions import FUNCTIONS

MixerHandler: TypeAlias = Callable[..., Any]
"""Takes the name of a function of `FUNCTIONS`, and its arguments; returns its result."""

_handler: ContextVar[MixerHandler | None] = ContextVar("inflight_mixer_handler", default=None)
_HOOKED = "_inflight_hooked"


def hook_mixers(model: PreTrainedModel) -> None:
    """Replace the functions that a model's modules call, once for each class. Without `mix_with` they do as before."""
    for each in {type(module) for module in model.modules()}:
        names = getattr(each.forward, "__globals__", {})
        for name, function in list(names.items()):
            if (known := _name_of(name, function)) in FUNCTIONS:
                names[name] = _hooked(known, function)


def _name_of(name: str, function: Any) -> str:
    """What a function of a model, under a name, stands for, as `use_kernel_func_from_hub_with_fallback` was told; else
    the name, since some models have their own torch code for such a function (LFM3); "": it is hooked."""
    if not inspect.isfunction(function) or hasattr(function, _HOOKED):
        return ""
    if not hasattr(function, "__wrapped__"):
        return name
    return str(inspect.getclosurevars(function).nonlocals.get("func_name", ""))


def _hooked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        handler = _handler.get()
        return function(*args, **kwargs) if handler is None else handler(name, *args, **kwargs)

    setattr(call, _HOOKED, True)
    return call


@contextmanager
def mix_with(handler: MixerHandler) -> Iterator[None]:
    """A context in which the functions of models in this thread go to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


@contextmanager
def run_mixers(mixing: MixingBackend) -> Iterator[None]:
    """A context for one forward pass of a model in this thread, whose mixers run by `mixing`. Raises `RuntimeError` if
    it does not mix as at load."""
    mixing.begin_pass()
    with mix_with(functools.partial(_mix, mixing)), BatchInvariantElementwise() if mixing.handles else nullcontext():
        yield
    if mixing.num_missing:
        raise RuntimeError("the model mixes tokens less often than at load")


def _mix(operators: Operators, name: str, *args: Any, **kwargs: Any) -> Any:
    return mix(name, operators, *args, **kwargs)


@contextmanager
def watch_modules(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """A context that keeps the running modules in a list, outermost first."""
    running: list[nn.Module] = []
    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(lambda module, _, __: (running.pop(), None)[1], always_call=True),
        )
    ]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()
