"""A model's linear layers with prepacked weights: laid out once at load, read at full speed ever after.

`LinearCalls` watches a forward pass and finds what can run as one: layers beside each other that read the same tensor
(query, key and value; gate and up), and an activation that reads nothing but a layer's output. `prepack_linears` then
replaces the modules. Weights are prepacked layer by layer and the plain copy is let go at once; an input embedding that
shares its weight with the output head reads its rows out of the prepacked one.

Knows modules and tensors, no architecture. Whoever prepacks them proves the model afterwards (`probe`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from inflight.execution.kernels import kernels_available
from inflight.execution.weights.prepacked_linear import PrepackedLinear, WeightLayout, prepack_linear, quantise

ACTIVATIONS: dict[type[nn.Module], tuple[str, str]] = {
    nn.ReLU: ("relu", "none"),
    nn.SiLU: ("swish", "none"),
    SiLUActivation: ("swish", "none"),
    GELUActivation: ("gelu", "none"),
    NewGELUActivation: ("gelu", "tanh"),
    GELUTanh: ("gelu", "tanh"),
}
"""Activations that a prepacked layer computes itself: its name for each, and the variant."""


# ------------------------------------------------------------------------------------ what runs together


@dataclass
class LinearCalls:
    """What a forward pass did with linear layers; modules by name.

    Attributes:
        siblings: layers of one parent, called in this order, that read the same tensor.
        activations: the activation module that follows a layer, by the layer's name.
        called: patterns of the names of layers that were called. (Of others models may read the weight themselves.)
    """

    siblings: list[tuple[str, ...]] = field(default_factory=list)
    activations: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


@contextmanager
def watch_linears(model: nn.Module) -> Iterator[LinearCalls]:
    """Watch one forward pass; what was found is complete when the context is left."""
    calls = LinearCalls()
    readers: list[tuple[torch.Tensor, list[str]]] = []  # a tensor, and the layers of one parent that read it in turn
    outputs: list[tuple[torch.Tensor, str]] = []
    num_calls: dict[str, int] = {}

    def see_linear(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            num_calls[name] = num_calls.get(name, 0) + 1
            calls.called.add(_pattern(name))
            outputs.append((output, name))
            if readers and readers[-1][0] is args[0] and _parent(readers[-1][1][-1]) == _parent(name):
                readers[-1][1].append(name)
            else:
                readers.append((args[0], [name]))

        return see

    def see_activation(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            num_calls[name] = num_calls.get(name, 0) + 1
            if outputs and args[0] is outputs[-1][0]:
                calls.activations[outputs[-1][1]] = name

        return see

    hooks = []
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            hooks.append(module.register_forward_hook(see_linear(name)))
        elif type(module) in ACTIVATIONS:
            hooks.append(module.register_forward_hook(see_activation(name)))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
    once = {name for name, number in num_calls.items() if number == 1}
    calls.siblings = [tuple(names) for _, names in readers if len(names) > 1 and once.issuperset(names)]
    together = {name for names in calls.siblings for name in names}
    calls.activations = {
        linear: activation
        for linear, activation in calls.activations.items()
        if {linear, activation} <= once and linear not in together
    }


def is_linear(module: nn.Module) -> bool:
    """Whether it is one of the two linear layers that models are made of, and not a subclass with ideas of its own."""
    return type(module) in (nn.Linear, Conv1D)


def _pattern(name: str) -> str:
    """The same for a layer of each block, and each expert of it."""
    return re.sub(r"\d+", "#", name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


# ------------------------------------------------------------------------------------ prepacking

LetGo: TypeAlias = Callable[[torch.Tensor], None]
"""What is done with the memory of a weight that was prepacked."""


def can_prepack(model: PreTrainedModel) -> bool:
    """Whether there are prepacked linear layers for this model's device and dtype, here."""
    if model.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return model.dtype == torch.float32 or (
        model.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack_linears(
    model: PreTrainedModel, calls: LinearCalls, *, quantized: bool = False, let_go: LetGo | None = None
) -> None:
    """Replace every linear layer of `model`, which is ours alone, by a prepacked one.

    Args:
        calls: what may run together.
        quantized: whether weights become int8, with a scale for each output channel.
        let_go: called with each weight that is not needed any more.
    """
    let_go = let_go or (lambda weight: None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and is_linear(head) and embedding.weight is head.weight
    modules = dict(model.named_modules(remove_duplicate=False))
    originals = {name: modules[name] for name in calls.activations.values()}
    for names in calls.siblings:
        if not all(name in modules and is_linear(modules[name]) for name in names):
            continue
        members = [modules[name] for name in names]
        if len({m.weight.dtype for m in members}) > 1:
            continue
        together = SiblingLinears(members, quantized=quantized)
        for number, name in enumerate(names):
            _replace(model, name, SiblingLinear(together, number))
            let_go(modules[name].weight)
            modules[name]._parameters.clear()
            modules[name] = nn.Identity()
        del members
    shared: dict[int, PrepackedLinear] = {}  # a module that has several names is prepacked once
    for name in list(modules):
        module = modules.pop(name)
        if isinstance(model.get_submodule(name), nn.Identity | SiblingLinear):
            continue
        if type(module) in ACTIVATIONS and kernels_available():
            _replace(model, name, RowActivation(module))
        if not is_linear(module) or not module.weight.is_floating_point() or _pattern(name) not in calls.called:
            continue
        if id(module) not in shared:
            activation = calls.activations.get(name)
            kind = ACTIVATIONS[type(originals[activation])] if activation else ("none", "none")
            shared[id(module)] = prepack_linear(*_weight_and_bias(module), *kind, quantized=quantized)
            if activation:
                _replace(model, activation, nn.Identity())
        _replace(model, name, shared[id(module)])
        if module is head and is_tied:
            share_prepacked_weight(embedding, shared[id(module)])
        if module._parameters:
            let_go(module.weight)
        module._parameters.clear()


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    setattr(model.get_submodule(_parent(name)), name.rpartition(".")[2], module)


def _weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[out, in]` and `[out]` of a linear layer of either kind."""
    weight, bias = module.weight.detach(), module.bias
    return (weight.T if isinstance(module, Conv1D) else weight), None if bias is None else bias.detach()


class RowActivation(nn.Module):
    """An activation that gives an element the same bits wherever it lies; torch's own operators compute the ends of a
    thread's share by another routine."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.activation, self.variant = ACTIVATIONS[type(original)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…]` to `[…]`. In a compiled model the original, which the compiler fuses with what stands around it."""
        if torch.compiler.is_compiling() or x.dtype not in (torch.float32, torch.bfloat16):
            return self.original(x)  # type: ignore[no-any-return]
        return torch.ops.inflight.activate(x, self.activation, self.variant)  # type: ignore[no-any-return]


class SiblingLinears:
    """Linear layers that read the same tensor, computed as one when the first of them is called."""

    def __init__(self, members: Sequence[nn.Module], *, quantized: bool) -> None:
        weights, biases = zip(*map(_weight_and_bias, members), strict=True)
        self.sizes = [weight.shape[0] for weight in weights]
        bias = _joined(biases, self.sizes, weights[0].dtype)
        self.linear = prepack_linear(torch.cat(weights), bias, quantized=quantized)
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """`[…, out]` of one of them; they are called in order, with the same `x`."""
        if number == 0:
            self._outputs = self.linear(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._outputs = ()
        return output


def _joined(biases: Iterable[torch.Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    biases = list(biases)
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([torch.zeros(size, dtype=dtype) if bias is None else bias for bias, size in pairs])


class SiblingLinear(nn.Module):
    """One of several linear layers that are computed as one."""

    def __init__(self, together: SiblingLinears, number: int) -> None:
        super().__init__()
        self.together, self.number = together, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        return self.together.output(x, self.number)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"number {self.number} of {self.together.linear.extra_repr()}"


# ------------------------------------------------------------------------------------ a tied embedding


class PrepackedEmbedding(nn.Embedding):
    """An embedding that has no weight of its own: it reads the rows of a prepacked output head.

    Layouts are blocked: an element's place is the sum of what its row and what its column contribute.
    """

    weight: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` to `[…, hidden]`."""
        return self.weight.rows(input)  # type: ignore[no-any-return]


class PrepackedTable:
    """What stands for such an embedding's weight: its rows can be had, by those who look them up themselves.

    Args:
        head: holds the memory behind the layout.
        dtype: of the rows.
    """

    def __init__(self, head: PrepackedLinear, layout: WeightLayout, dtype: torch.dtype) -> None:
        self.head, self.layout, self.dtype = head, layout, dtype
        self.device = torch.device("cpu")
        self.shape = torch.Size((head.out_features, head.in_features))

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Row numbers `[…]` to `[…, hidden]`."""
        rows = self.layout.elements[self.layout.row_places[numbers][..., None] + self.layout.column_places]
        if self.head.scales is None:
            return rows
        return (rows * self.head.scales[numbers][..., None]).to(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self.rows(torch.arange(len(self))[first])
        return rows[..., *others] if others else rows

    def __len__(self) -> int:
        return self.head.out_features


def share_prepacked_weight(embedding: nn.Embedding, head: PrepackedLinear) -> None:
    """Let `embedding` read its own weight out of `head`, which has it prepacked, if that is possible."""
    layout = head.layout()
    if layout is None:
        return
    sample = torch.linspace(0, head.out_features - 1, 64, dtype=torch.float64).long()
    expected = embedding.weight[sample]
    if head.scales is not None:
        expected = quantise(expected)[0]
    if not torch.equal(layout.elements[layout.row_places[sample][:, None] + layout.column_places], expected):
        return
    kind = type(embedding)
    # A subclass (one that scales, say) goes on in front of the class that looks up.
    embedding.__class__ = (
        PrepackedEmbedding
        if kind is nn.Embedding
        else type(f"Prepacked{kind.__name__}", (kind, PrepackedEmbedding), {})
    )
    dtype = embedding.weight.dtype
    embedding._parameters.clear()
    cast(PrepackedEmbedding, embedding).weight = PrepackedTable(head, layout, dtype)
