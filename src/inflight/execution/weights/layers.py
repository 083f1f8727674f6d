"""The modules that stand in a model for its own: activations, linear layers that run as one, and narrow ones."""

from collections.abc import Sequence

import torch
from torch import nn

from inflight.execution.weights.linear_calls import ACTIVATIONS
from inflight.execution.weights.prepacked_linear import PrepackedLinear

STEP = 64
"""torch's elementwise operators take a multiple of this many elements at once, and compute the rest by another routine,
with other bits."""
MIN_INVARIANT_ROWS = 2
"""A single row would take another path through oneDNN, with other bits."""
MAX_NARROW = 512
"""Rows of more elements are not made apart: of what reads them, activations have operators of ours."""


def is_narrow(size: int) -> bool:
    """Whether rows of this width could get other bits from what stands beside them."""
    return size % STEP != 0 and size < MAX_NARROW


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows `[…, n]`, with a gap after each: what torch does with them (a sigmoid, say), it then does row by
    row, so that their bits do not depend on how many rows there are."""
    size = x.shape[-1]
    gap = 2 - size % 2  # an even distance, so that pairs can be read as complex numbers
    return x.new_empty(*x.shape[:-1], size + gap)[..., :size].copy_(x)


class NarrowLinear(nn.Module):
    """A prepacked layer of few outputs, in rows apart."""

    def __init__(self, linear: PrepackedLinear) -> None:
        super().__init__()
        self.linear = linear
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        return rows_apart(self.linear(x))


class RowActivation(nn.Module):
    """An activation that gives an element the same bits wherever it lies. (torch's own operators compute the ends of a
    thread's share by another routine, with other bits.)"""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.activation, self.variant = ACTIVATIONS[type(original)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…]` to `[…]`."""
        if x.dtype not in (torch.float32, torch.bfloat16):
            return self.original(x)  # type: ignore[no-any-return]
        return torch.ops.inflight.activate(x, self.activation, self.variant)  # type: ignore[no-any-return]


class SiblingLinears:
    """Linear layers that read the same tensor, computed as one when the first of them is called.

    Args:
        linear: all of them in one layer, in the order of their calls.
        sizes: the number of outputs of each.
    """

    def __init__(self, linear: PrepackedLinear, sizes: Sequence[int]) -> None:
        self.linear, self.sizes = linear, list(sizes)
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """The output `[…, out]` of one of them for `x` `[…, in]`. They are called in order, with the same `x`."""
        if number == 0:
            self._outputs = self.linear(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._outputs = ()
        return output


class SiblingLinear(nn.Module):
    """One of several linear layers that are computed as one: it has the place of a `Linear` in the model."""

    def __init__(self, together: SiblingLinears, number: int) -> None:
        super().__init__()
        self.together, self.number = together, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`."""
        return self.together.output(x, self.number)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"number {self.number} of {self.together.linear.extra_repr()}"
