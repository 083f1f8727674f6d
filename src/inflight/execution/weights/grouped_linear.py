"""Linear layers with grouped weights (`grouped_weight`), in two arithmetics.

*Exact* expands a few chunks of 32 inputs to the model's dtype in the L1 cache and multiplies them like a plain panel,
so it gives the bits of a plain layer with the dequantized weight, and uses the matrix unit in bfloat16. *Fast* rounds
the activations of each 32 inputs to int8; sums within a chunk are integers, sums of chunks float32. It does not use the
matrix unit, whose sums would need scaling after every 32 inputs, which takes as long as the products without it.
"""

from dataclasses import replace

import torch

from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.kernels import kernels_available
from inflight.execution.mapped_memory import shared
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import StoredRows


class GroupedLinear(PanelLinear):
    """A layer that rounds the activations of each 32 inputs to int8, with their own scale, and multiplies them with the
    quantized numbers. (For float formats it is the exact one.)"""

    is_exact = False
    """Whether weights are expanded to the activations' dtype and multiplied like those of a plain layer."""

    def _prepack(self, weight: torch.Tensor) -> None:
        """See `PrepackedLinear`; the weight must be a `GroupedWeight`, not transposed."""
        assert isinstance(weight, GroupedWeight)
        assert weight.dim() == 2
        assert not weight.is_transposed
        (matrix,) = weight.matrices
        matrix = replace(matrix, panels=shared(matrix.panels))
        self.prepacked, self.kind = matrix.panels, weight.kind
        self._rows = replace(weight.stored_rows, matrix=matrix)
        can_be_fast = weight.grouping.has_integers and supports_int8_activations()
        self.is_exact = type(self).is_exact or not can_be_fast
        self._register(
            torch.ops.inflight.new_grouped_linear(
                *(self.prepacked, weight.grouping.words, matrix.order, self.is_exact, self.bias),
                *(self.in_features, self.out_features, self.activation, self.variant),
            )
        )

    def layout(self) -> StoredRows:
        """See `PrepackedLinear`."""
        return self._rows


class ExactGroupedLinear(GroupedLinear):
    """A layer equal to a plain layer with the dequantized weight."""

    is_exact = True


def can_group() -> bool:
    """Whether grouped weights are supported here; that needs our kernels."""
    return kernels_available()


def supports_int8_activations() -> bool:
    """Whether this CPU supports the fast arithmetic of `GroupedLinear`; if not, it is exact."""
    return can_group() and bool(torch.ops.inflight.supports_int8_activations())


def prefers_int8_activations() -> bool:
    """Whether this CPU is faster with `GroupedLinear` than with `ExactGroupedLinear`."""
    return can_group() and bool(torch.ops.inflight.prefers_int8_activations())
