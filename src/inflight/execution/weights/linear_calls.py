"""Finds linear layers to fuse, by observing a forward pass.

Consecutive layers that read the same tensor (query, key and value; gate and up), and a layer with an activation that
reads only its output. Tensors are compared by identity; no architecture is special-cased.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

ACTIVATIONS: dict[type[nn.Module], tuple[str, str]] = {
    nn.ReLU: ("relu", "none"),
    nn.SiLU: ("swish", "none"),
    SiLUActivation: ("swish", "none"),
    GELUActivation: ("gelu", "none"),
    NewGELUActivation: ("gelu", "tanh"),
    GELUTanh: ("gelu", "tanh"),
}
"""Activations that a prepacked layer computes: its name for each, and the variant."""


@dataclass
class LinearCalls:
    """A forward pass's use of linear layers; modules are given by name.

    Attributes:
        siblings: layers of one parent, in the order of their calls, that read the same tensor.
        activations: for each layer that an activation follows, this activation.
        patterns: the names of called layers, with "#" for every number. Other layers are left alone: a model may read
            their weights directly.
    """

    siblings: list[tuple[str, ...]] = field(default_factory=list)
    activations: dict[str, str] = field(default_factory=dict)
    patterns: set[str] = field(default_factory=set)

    def include(self, name: str) -> bool:
        """Whether a layer was called, or one of the same name in another block or expert."""
        return _pattern(name) in self.patterns


@contextmanager
def watch_linears(model: nn.Module) -> Iterator[LinearCalls]:
    """Watch one forward pass; the result is complete when the context is left."""
    calls = LinearCalls()
    readers: list[tuple[torch.Tensor, list[str]]] = []  # a tensor, and the layers of one parent that read it in turn
    outputs: list[tuple[torch.Tensor, str]] = []
    num_calls: Counter[str] = Counter()

    def observe(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        num_calls[name] += 1
        if not is_linear(module):
            if outputs and args[0] is outputs[-1][0]:
                calls.activations[outputs[-1][1]] = name
            return
        calls.patterns.add(_pattern(name))
        outputs.append((output, name))
        if readers and readers[-1][0] is args[0] and _parent(readers[-1][1][-1]) == _parent(name):
            readers[-1][1].append(name)
        else:
            readers.append((args[0], [name]))

    modules = list(model.named_modules(remove_duplicate=False))
    num_names = Counter(id(module) for _, module in modules)
    alone = {name for name, module in modules if num_names[id(module)] == 1 and not is_watched(module)}
    hooks = [
        module.register_forward_hook(partial(observe, name))
        for name, module in modules
        if is_linear(module) or type(module) in ACTIVATIONS
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
    once = {name for name, number in num_calls.items() if number == 1 and name in alone}
    calls.siblings = [tuple(names) for _, names in readers if len(names) > 1 and once.issuperset(names)]
    together = {name for names in calls.siblings for name in names}
    calls.activations = {
        linear: activation
        for linear, activation in calls.activations.items()
        if {linear, activation} <= once and linear not in together
    }


def is_linear(module: nn.Module) -> bool:
    """Whether it is exactly one of the two linear classes; a subclass may compute differently."""
    return type(module) in (nn.Linear, Conv1D)


class OwnForward(partial[Any]):
    """A `forward` that we have set on a module."""


def is_watched(module: nn.Module) -> bool:
    """Whether a caller has set hooks or a `forward` on it, which a replacement would not run."""
    is_replaced = not isinstance(vars(module).get("forward"), OwnForward | None)
    return bool(module._forward_hooks or module._forward_pre_hooks or is_replaced)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
