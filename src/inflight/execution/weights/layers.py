"""Replacement modules: activations, fused linear layers, and narrow ones."""

from collections.abc import Sequence

import torch
from torch import nn

from inflight.execution.weights.linear_calls import ACTIVATIONS
from inflight.execution.weights.prepacked_linear import PrepackedLinear

STEP = 64
"""torch's elementwise operators process multiples of this many elements, and the rest by another routine, with other
bits."""
MIN_INVARIANT_ROWS = 2
"""oneDNN computes a single row differently, with other bits."""
MAX_NARROW = 512
"""Wider rows are not spaced: activations that read them have our own operators."""


def is_narrow(size: int) -> bool:
    """Whether neighbours could change the bits of rows of this width."""
    return size % STEP != 0 and size < MAX_NARROW


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows `[…, n]`, of their dtype, with a gap after each, so that torch's elementwise operators work row by
    row, and bits do not depend on the number of rows."""
    size = x.shape[-1]
    gap = 2 - size % 2  # an even stride, so that pairs can be read as complex numbers
    return x.new_empty(*x.shape[:-1], size + gap)[..., :size].copy_(x)


class NarrowLinear(nn.Module):
    """A prepacked layer of few outputs, in spaced rows."""

    def __init__(self, linear: PrepackedLinear) -> None:
        super().__init__()
        self.linear = linear
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`, float32 or bfloat16."""
        return rows_apart(self.linear(x))


class RowActivation(nn.Module):
    """An activation whose bits do not depend on an element's place. (torch's operators compute the end of each thread's
    share by another routine, with other bits.)"""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.activation, self.variant = ACTIVATIONS[type(original)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…]` to `[…]`, of one dtype; float32 and bfloat16 by our kernel."""
        if x.dtype not in (torch.float32, torch.bfloat16):
            return self.original(x)  # type: ignore[no-any-return]
        return torch.ops.inflight.activate(x, self.activation, self.variant)  # type: ignore[no-any-return]


class SiblingLinears:
    """Linear layers that read the same tensor, computed together when the first is called.

    Args:
        linear: the fused layer, in call order.
        sizes: the number of outputs of each.
    """

    def __init__(self, linear: PrepackedLinear, sizes: Sequence[int]) -> None:
        self.linear, self.sizes = linear, list(sizes)
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """One layer's output `[…, out]` for `x` `[…, in]`, float32 or bfloat16. They are called in order, with the same
        `x`."""
        if number == 0:
            self._outputs = self.linear(x).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._outputs = ()
        return output


class SiblingLinear(nn.Module):
    """One of several fused linear layers, in the place of a `Linear`."""

    def __init__(self, together: SiblingLinears, number: int) -> None:
        super().__init__()
        self.together, self.number = together, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`, float32 or bfloat16."""
        return self.together.output(x, self.number)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"number {self.number} of {self.together.linear.extra_repr()}"
