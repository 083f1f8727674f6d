"""A linear layer whose weight is laid out once, at load, for how it will be read.

Two kinds of layer do the same: `PanelLinear` runs our kernel, on CPUs that have AVX-512 (with BF16 and VNNI, or AMX,
for these dtypes); `OneDnnLinear` runs oneDNN's prepacked operators everywhere else. `prepack_linear` chooses.

A prepacked layer gives a row the same bits beside any number of other rows; oneDNN's does so from two rows on, as
a single one takes another way, so nobody should run one.
"""

import ctypes
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from inflight.execution.kernels import kernels_available

QUANTISED_ROWS = 8192
"""Of a weight, how many rows are rounded at a time."""
PANEL_OUTPUTS = 32
PANEL_PACKS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""Of a weight in panels, the outputs that lie beside each other, and for each of them the neighbouring inputs."""
ZERO_POINT = 128
"""oneDNN multiplies unsigned by signed integers: rounded activations are shifted by this."""


@dataclass(frozen=True)
class WeightLayout:
    """Where the elements of a prepacked weight lie, for as long as its layer exists:
    `elements[row_places[row] + column_places[column]]`."""

    elements: torch.Tensor
    row_places: torch.Tensor
    column_places: torch.Tensor


class PrepackedLinear(nn.Module, ABC):
    """`activation(x @ weight.T + bias)` with a weight that only this layer can read.

    As int8 the weight has a scale for each output channel, and each row of activations is rounded to int8 with a scale
    of its own just before the product; sums are exact.

    Attributes:
        prepacked: the weight, in the layer's own layout.
        scales: of int8, of the output channels: `[out]` float32.
    """

    prepacked: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, variant: str, *, quantized: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty_like(weight, device="meta")  # for those who ask for its dtype: it has no elements
        self.bias = bias
        self.activation, self.variant = activation, variant
        self.scales: torch.Tensor | None = None
        if quantized:
            weight, self.scales = quantise(weight)
        self._prepack(weight)

    @abstractmethod
    def _prepack(self, weight: torch.Tensor) -> None:
        """Lay out a weight `[out, in]`: float32, bfloat16, or int8 with `scales`."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`, float32 or bfloat16."""

    @abstractmethod
    def layout(self) -> WeightLayout | None:
        """Where its weight's elements lie, if that is known."""

    def extra_repr(self) -> str:
        """For `print(model)`."""
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return f"in_features={self.in_features}, out_features={self.out_features}{activation}"


def prepack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "none",
    variant: str = "none",
    *,
    quantized: bool = False,
) -> PrepackedLinear:
    """The layer for this CPU.

    Args:
        weight: `[out, in]`, float32 or bfloat16; not kept.
        bias: `[out]` or None.
        activation: "none", "relu", "swish", or "gelu" with the variant "none" or "tanh".
        quantized: whether the weight becomes int8.
    """
    kind = PanelLinear if has_panels(torch.int8 if quantized else weight.dtype) else OneDnnLinear
    return kind(weight, bias, activation, variant, quantized=quantized)


def has_panels(dtype: torch.dtype) -> bool:
    """Whether our kernel runs on this CPU, for weights of a dtype."""
    return kernels_available() and bool(torch.ops.inflight.has_panels(dtype))


@cache
def sums_int8() -> bool:
    """Whether int8 layers are right on this CPU, tried on the largest numbers there are. Without VNNI oneDNN adds pairs
    of products in 16 bits, where they are cut off."""
    layer = prepack_linear(torch.ones(32, 64), None, quantized=True)
    return bool((layer(torch.ones(2, 64)) - 64).abs().max() < 1e-2)


class PanelLinear(PrepackedLinear):
    """Our kernel: `kernels/linear.h` describes the layout."""

    def _prepack(self, weight: torch.Tensor) -> None:
        self.prepacked = panels_of(weight)
        sizes, activation = (self.in_features, self.out_features), (self.activation, self.variant)
        self.number: int = torch.ops.inflight.new_linear(self.prepacked, self.bias, self.scales, *sizes, *activation)
        """By which the kernels know it."""
        weakref.finalize(self, torch.ops.inflight.delete_linear, self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PrepackedLinear`."""
        out: torch.Tensor = torch.ops.inflight.linear.default(x, self.number, self.out_features)
        return out

    def layout(self) -> WeightLayout:
        """See `PrepackedLinear`."""
        _, steps, _, pack = self.prepacked.shape
        rows, columns = torch.arange(self.out_features), torch.arange(self.in_features)
        row_places = rows // PANEL_OUTPUTS * steps * PANEL_OUTPUTS * pack + rows % PANEL_OUTPUTS * pack
        column_places = columns // pack * PANEL_OUTPUTS * pack + columns % pack
        return WeightLayout(self.prepacked.view(-1), row_places, column_places)


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out, in]` as `[out / 32, in / pack, 32, pack]`; what is missing to whole panels and packs is 0."""
    pack = PANEL_PACKS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    num_steps = -(-num_inputs // pack)
    panels = weight.new_empty(-(-num_outputs // PANEL_OUTPUTS), num_steps, PANEL_OUTPUTS, pack)
    if num_inputs % pack:
        weight = nn.functional.pad(weight, (0, num_steps * pack - num_inputs))
    num_whole = num_outputs // PANEL_OUTPUTS
    whole, rest = weight[: num_whole * PANEL_OUTPUTS], weight[num_whole * PANEL_OUTPUTS :]
    panels[:num_whole] = whole.view(num_whole, PANEL_OUTPUTS, num_steps, pack).transpose(1, 2)
    panels[num_whole:] = 0
    panels[num_whole:, :, : len(rest)] = rest.view(len(rest), num_steps, pack).transpose(0, 1)
    return panels


class OneDnnLinear(PrepackedLinear):
    """oneDNN's prepacked operators."""

    def _prepack(self, weight: torch.Tensor) -> None:
        if self.scales is not None:
            self.prepacked = torch.ops.onednn.qlinear_prepack(weight, None)
        else:
            self.prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PrepackedLinear`."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.scales is not None:
            return self._forward_int8(x)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.prepacked, self.bias, self.activation, [], self.variant
        )
        return out

    def _forward_int8(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        rows = x.reshape(-1, self.in_features).float()
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        scales = scales.where(scales.isfinite(), torch.nan)
        rounded = (rows / scales.clamp_min(1e-30)).round().nan_to_num().add(ZERO_POINT).to(torch.uint8)
        zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        sums = torch.ops.onednn.qlinear_pointwise(
            *(rounded, 1.0, ZERO_POINT, self.prepacked, self.scales, zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        out = sums * scales
        if self.bias is not None:
            out += self.bias
        return _activate(out, self.activation, self.variant).to(x.dtype).view(*x.shape[:-1], -1)

    def layout(self) -> WeightLayout | None:
        """See `PrepackedLinear`. None if oneDNN's descriptor is not the one of its version 3.

        The descriptor (`dnnl_memory_desc` as oneDNN serialises it) names the strides of blocks and the blocks' own
        dimensions from the outermost to the innermost, each a piece of one of the matrix's dimensions.
        """
        prepacked = self.prepacked  # int8 as [in, out]
        description = torch.ops.mkldnn._get_mkldnn_serialized_md(prepacked).numpy().tobytes()
        words = memoryview(description[: len(description) // 8 * 8]).cast("q")
        max_dims, rows, columns = 12, prepacked.shape[0], prepacked.shape[1]
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
        num_bytes = torch.ops.mkldnn._nbytes(prepacked)
        if int(places[0].max() + places[1].max()) * prepacked.dtype.itemsize >= num_bytes:
            return None
        memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(prepacked))
        row_places, column_places = places if self.scales is None else reversed(places)
        return WeightLayout(torch.frombuffer(memory, dtype=prepacked.dtype), row_places, column_places)


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


def _activate(x: torch.Tensor, activation: str, variant: str) -> torch.Tensor:
    if activation == "gelu":
        return nn.functional.gelu(x, approximate=variant)
    if activation == "swish":
        return nn.functional.silu(x)
    return x.relu() if activation == "relu" else x
