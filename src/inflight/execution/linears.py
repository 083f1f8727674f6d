"""A model's linear layers through oneDNN's prepacked weights: once reordered at load, read at full speed ever after.

`LinearCalls` watches a forward pass and finds what can run as one: layers beside each other that read the same tensor
(query, key and value; gate and up), and an activation that reads nothing but a layer's output. `pack_linears` then
replaces the modules. Weights are packed layer by layer and the unpacked copy is let go at once; an input embedding that
shares its weight with the output head reads its rows out of the packed one.

Knows modules and tensors, no architecture. Whoever packs proves the model afterwards (`probe`).

A packed layer gives a row the same bits beside any number of other rows, as long as there are two of them: a single row
takes another way through oneDNN, so nobody should run one.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from inflight.execution.native import kernels_available

ACTIVATIONS: dict[type[nn.Module], tuple[str, str | None]] = {
    nn.ReLU: ("relu", None),
    nn.SiLU: ("swish", None),
    SiLUActivation: ("swish", None),
    GELUActivation: ("gelu", "none"),
    NewGELUActivation: ("gelu", "tanh"),
    GELUTanh: ("gelu", "tanh"),
}
"""Activations that oneDNN computes with a linear layer: its name for each, and the variant."""

QUANTISED_ROWS = 8192
"""Of a weight, how many rows are rounded at a time."""


# ------------------------------------------------------------------------------------ what runs together


@dataclass
class LinearCalls:
    """What a forward pass did with linear layers; modules by name.

    Attributes:
        siblings: layers of one parent, called in this order, that read the same tensor.
        activations: the activation module that follows a layer, by the layer's name.
    """

    siblings: list[tuple[str, ...]] = field(default_factory=list)
    activations: dict[str, str] = field(default_factory=dict)


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


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


# ------------------------------------------------------------------------------------ packing


def can_pack(model: PreTrainedModel) -> bool:
    """Whether oneDNN has prepacked linear layers for this model's device and dtype, here."""
    if model.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return model.dtype == torch.float32 or (
        model.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: PreTrainedModel, calls: LinearCalls, *, quantized: bool = False) -> None:
    """Replace every linear layer of `model`, which is ours alone, by a packed one.

    Args:
        calls: what may run together.
        quantized: whether weights become int8, with a scale for each output channel.
    """
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
            modules[name] = nn.Identity()
        del members
    shared: dict[int, PackedLinear] = {}  # a module that has several names is packed once
    for name in list(modules):
        module = modules.pop(name)
        if isinstance(model.get_submodule(name), nn.Identity | SiblingLinear):
            continue
        if type(module) in ACTIVATIONS and kernels_available():
            _replace(model, name, RowActivation(module))
        if not is_linear(module) or not module.weight.is_floating_point():
            continue
        if id(module) not in shared:
            activation = None if quantized else calls.activations.get(name)
            kind = ACTIVATIONS[type(originals[activation])] if activation else ("none", None)
            shared[id(module)] = PackedLinear(*_weight_and_bias(module), *kind, quantized=quantized)
            if activation:
                _replace(model, activation, nn.Identity())
        _replace(model, name, shared[id(module)])
        if module is head and is_tied:
            share_packed_weight(embedding, shared[id(module)])
        module._parameters.clear()


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    setattr(model.get_submodule(_parent(name)), name.rpartition(".")[2], module)


def _weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[out, in]` and `[out]` of a linear layer of either kind."""
    weight, bias = module.weight.detach(), module.bias
    return (weight.T if isinstance(module, Conv1D) else weight), None if bias is None else bias.detach()


class PackedLinear(nn.Module):
    """`activation(x @ weight.T + bias)` with a weight that oneDNN has laid out for itself.

    As int8 the weight has a scale for each output channel, and each row of activations is rounded to int8 with a scale
    of its own just before the product; sums are exact.

    Args:
        weight: `[out, in]`; not kept.
        bias: `[out]` or None.
        activation: "none" or a name in `ACTIVATIONS`, and its variant; not with int8.
        quantized: whether the weight becomes int8; needs `kernels_available()`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str = "none",
        variant: str | None = None,
        *,
        quantized: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.activation, self.variant = activation, variant
        self.scales: torch.Tensor | None = None
        if quantized:
            rounded, self.scales = quantise(weight)
            self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.number: int | None = None
        """By which our kernels know it."""
        if kernels_available():
            self.number = torch.ops.inflight.new_linear(self.packed, bias, self.scales, activation, variant)
            weakref.finalize(self, torch.ops.inflight.delete_linear, self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        out: torch.Tensor
        if self.number is not None:
            out = torch.ops.inflight.linear.default(x, self.number, self.out_features)
            return out
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        out = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, self.activation, [], self.variant)
        return out

    def extra_repr(self) -> str:
        """For `print(model)`."""
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return f"in_features={self.in_features}, out_features={self.out_features}{activation}"


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
        return torch.ops.inflight.activate(x, self.activation, self.variant or "none")  # type: ignore[no-any-return]


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[out, in]` as int8 in [-127, 127], and the scale of each output channel: `[out]` float32."""
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), QUANTISED_ROWS):  # a large head is never there in float32 as a whole
        rows = weight[first : first + QUANTISED_ROWS].float()
        scale = rows.abs().amax(dim=1) / 127
        scales[first : first + QUANTISED_ROWS] = scale
        rounded[first : first + QUANTISED_ROWS] = (rows / scale.clamp_min(1e-30)[:, None]).round()
    return rounded, scales


class SiblingLinears:
    """Linear layers that read the same tensor, computed as one when the first of them is called."""

    def __init__(self, members: Sequence[nn.Module], *, quantized: bool) -> None:
        weights, biases = zip(*map(_weight_and_bias, members), strict=True)
        self.sizes = [weight.shape[0] for weight in weights]
        bias = _joined(biases, self.sizes, weights[0].dtype)
        self.linear = PackedLinear(torch.cat(weights), bias, quantized=quantized)
        for member in members:
            member._parameters.clear()
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


class PackedEmbedding(nn.Embedding):
    """An embedding that has no weight of its own: it reads the rows of a packed output head.

    oneDNN's layout is blocked: an element's place is the sum of what its row and what its column contribute.
    """

    head: PackedLinear
    elements: torch.Tensor
    row_places: torch.Tensor
    column_places: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` to `[…, hidden]`."""
        rows = self.elements[self.row_places[input][..., None] + self.column_places]
        if self.head.scales is None:
            return rows
        return (rows * self.head.scales[input][..., None]).to(self.weight.dtype)


def share_packed_weight(embedding: nn.Embedding, head: PackedLinear) -> None:
    """Let `embedding` read the weight of `head`, which is its own, packed; if that can't be done, it keeps its own."""
    layout = packed_layout(head.packed)
    if layout is None:
        return
    elements, *places = layout
    row_places, column_places = places if head.scales is None else reversed(places)  # int8 is packed as [in, out]
    sample = torch.linspace(0, head.out_features - 1, 64).long()
    expected = embedding.weight[sample]
    if head.scales is not None:
        expected = quantise(expected)[0]
    if not torch.equal(elements[row_places[sample][:, None] + column_places], expected):
        return
    kind = type(embedding)
    # A subclass (one that scales, say) goes on in front of the class that looks up.
    embedding.__class__ = (
        PackedEmbedding if kind is nn.Embedding else type(f"Packed{kind.__name__}", (kind, PackedEmbedding), {})
    )
    dtype = embedding.weight.dtype
    embedding._parameters.clear()
    embedding.weight = torch.empty(0, dtype=dtype)
    embedding.head = head  # holds the memory behind `elements`
    embedding.elements, embedding.row_places, embedding.column_places = elements, row_places, column_places


def packed_layout(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """A packed matrix's memory as a flat tensor, and what each row and each column adds to an element's place in it;
    None if its descriptor is not the one of oneDNN 3.

    The descriptor (`dnnl_memory_desc` as oneDNN serialises it) names the strides of blocks and the blocks' own
    dimensions from the outermost to the innermost, each a piece of one of the matrix's dimensions."""
    description = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
    words = memoryview(description[: len(description) // 8 * 8]).cast("q")
    max_dims, rows, columns = 12, packed.shape[0], packed.shape[1]
    if len(words) < 77 or tuple(words[1:3]) != (rows, columns) or words[52] > max_dims or words[38] != 0:
        return None
    num_inner, sizes, dims = words[52], list(words[53:65]), list(words[65:77])
    places = []
    for dim, length in enumerate((rows, columns)):
        index, place = torch.arange(length), torch.zeros(length, dtype=torch.int64)
        stride = 1
        for size, its_dim in reversed(list(zip(sizes[:num_inner], dims[:num_inner], strict=True))):
            if its_dim == dim:
                place += index % size * stride
                index = index // size
            stride *= size
        places.append(place + index * words[40 + dim])
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    if int(places[0].max() + places[1].max()) * packed.dtype.itemsize >= num_bytes:
        return None
    memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=packed.dtype), places[0], places[1]
