"""Linear layers through our own kernel, on CPUs with AVX2, AVX-512 or AMX.

`kernels/linear.h` describes the layout: panels of 32 outputs, which the kernel reads in the order of memory.
"""

import torch
from torch import nn

from inflight.execution.kernels import PANEL_OUTPUTS, delete_with
from inflight.execution.mapped_memory import new_weight, shared
from inflight.execution.weights.prepacked_linear import PrepackedLinear, StoredRows, WeightLayout

PANEL_INPUTS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""Neighbouring inputs stored together for each output: as many as one instruction multiplies and adds."""


class PanelLinear(PrepackedLinear):
    """A layer in panels; `number` is the kernels' handle."""

    number: int

    def _prepack(self, weight: torch.Tensor) -> None:
        """See `PrepackedLinear`."""
        self.prepacked = shared(self._panels_of(weight))
        sizes, activation = (self.in_features, self.out_features), (self.activation, self.variant)
        self._register(torch.ops.inflight.new_linear(self.prepacked, self.bias, self.scales, *sizes, *activation))

    def _register(self, number: int) -> None:
        """Set the kernels' handle, released with the layer."""
        self.number = number
        delete_with(self, torch.ops.inflight.delete_linear, number)

    def _panels_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The panels of a weight `[out, in]`, see `panels_of`."""
        return panels_of(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PrepackedLinear`."""
        out: torch.Tensor = torch.ops.inflight.linear.default(x, self.number, self.out_features)
        return out

    def layout(self) -> StoredRows | None:
        """See `PrepackedLinear`."""
        _, steps, _, width = self.prepacked.shape
        rows, columns = torch.arange(self.out_features), torch.arange(self.in_features)
        row_places = rows // PANEL_OUTPUTS * steps * PANEL_OUTPUTS * width + rows % PANEL_OUTPUTS * width
        column_places = columns // width * PANEL_OUTPUTS * width + columns % width
        return WeightLayout(self.prepacked.view(-1), row_places, column_places, self.scales)


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out, in]` as panels `[out / 32, in / n, 32, n]`, both quotients rounded up and the rest filled with
    zeros; n is `PANEL_INPUTS` of its dtype, which must be float32, bfloat16 or int8."""
    width = PANEL_INPUTS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    num_steps = -(-num_inputs // width)
    panels = new_weight((-(-num_outputs // PANEL_OUTPUTS), num_steps, PANEL_OUTPUTS, width), weight.dtype)
    if num_inputs % width:
        weight = nn.functional.pad(weight, (0, num_steps * width - num_inputs))
    torch.ops.inflight.pack_panels(weight.contiguous(), panels)
    return panels
