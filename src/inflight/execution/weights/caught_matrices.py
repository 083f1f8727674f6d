"""Parameters that a model multiplies with outside linear layers: routers, Mamba's projections of time steps, and
experts run by its own code. Tensor subclasses intercept these products and run them with prepacked matrices, so that a
token gets the same bits in any batch. Otherwise they behave as parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from inflight.execution.grouped.weight import as_values
from inflight.execution.weights.formats import PLAIN
from inflight.execution.weights.layers import MIN_INVARIANT_ROWS, is_narrow, rows_apart
from inflight.execution.weights.prepacked_linear import PrepackedLinear

CONVERSIONS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)
"""Give a copy in another dtype."""

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class CaughtMatrix(nn.Parameter):
    """A matrix `[out, in]` that `functional.linear` uses in prepacked form; otherwise a parameter.

    Attributes:
        prepacked: one layer for each dtype used.
    """

    prepacked: dict[torch.dtype, PrepackedLinear]

    @classmethod
    def from_weight(cls, weight: torch.Tensor, *, is_copied: bool = True) -> "CaughtMatrix":
        """Wrap a weight `[out, in]`, float, or a copy of it."""
        weight = as_values(weight.detach())
        caught = torch.Tensor._make_subclass(cls, weight.clone() if is_copied else weight, False)
        caught.prepacked = {}
        return caught

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept `functional.linear`; a copy in another dtype shares the prepacked forms."""
        kwargs = kwargs or {}
        if function is functional.linear:
            return _linear(*args, **kwargs)
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        source = args[0] if args else None
        if function not in CONVERSIONS or not isinstance(source, CaughtMatrix) or not isinstance(result, torch.Tensor):
            return result
        converted = torch.Tensor._make_subclass(cls, result, False)
        converted.prepacked = source.prepacked
        return converted

    def project(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`functional.linear`: `[…, in]` to `[…, out]`, bias `[out]`, all of this matrix's dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            if x.numel() == 0:
                return functional.linear(x, self.detach(), bias)
            rows = x.reshape(-1, x.shape[-1])
            padded = rows if len(rows) >= MIN_INVARIANT_ROWS else rows.expand(MIN_INVARIANT_ROWS, -1)
            out: torch.Tensor = self.linear()(padded)[: len(rows)]
            out = (out if bias is None else out + bias).view(*x.shape[:-1], -1)
            return rows_apart(out) if is_narrow(out.shape[-1]) else out

    def linear(self) -> PrepackedLinear:
        """The prepacked layer for its current dtype."""
        if self.dtype not in self.prepacked:
            self.prepacked[self.dtype] = PLAIN.prepack_linear(self.detach(), None)
        return self.prepacked[self.dtype]


class LeftMatrix(CaughtMatrix):
    """A matrix `[out, in]` that a model multiplies columns with: `matrix @ x`."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept the product with `[…, in, T]`."""
        if function in PRODUCTS and isinstance(args[0], LeftMatrix):
            return args[0].project(args[1].transpose(-1, -2)).transpose(-1, -2)
        return super().__torch_function__(function, types, args, kwargs)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear`, `[…, in]` to `[…, out]`, with an argument that is a `CaughtMatrix`."""
    if isinstance(weight, CaughtMatrix):
        return weight.project(input, bias)
    with torch._C.DisableTorchFunctionSubclass():
        return functional.linear(input, weight, bias)


class CaughtMatrices(nn.Parameter):
    """The matrices `[experts, …]` of a model that runs experts by its own code. Used one by one (`functional.linear(x,
    matrices[i])`: JetMoE, LongCat) or all at once (`torch.bmm`: Llama 4), they are prepacked on first use. Otherwise a
    parameter.

    Attributes:
        used: the matrices `[out, in]`, by expert, after first use.
    """

    used: list[CaughtMatrix]

    @classmethod
    def from_weights(cls, weights: torch.Tensor) -> "CaughtMatrices":
        """Wrap weights `[experts, …]`, float, without a copy."""
        matrices = torch.Tensor._make_subclass(cls, as_values(weights.detach()), False)
        matrices.used = []
        return matrices

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept `matrices[i]` and `torch.bmm`."""
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.bmm and len(args) == 2 and isinstance(args[1], CaughtMatrices):
                return args[1].run_all(args[0])
            if function is torch.Tensor.__getitem__ and isinstance(args[1], int):
                return args[0].matrix_of(args[1])
            return function(*args, **(kwargs or {}))

    def matrix_of(self, expert: int) -> CaughtMatrix:
        """The matrix of an expert, where they are `[experts, out, in]`."""
        if not self.used:
            self._prepack(self.detach())
        return self.used[expert]

    def run_all(self, x: torch.Tensor) -> torch.Tensor:
        """`torch.bmm` with `[experts, in, out]`: `[experts, T, in]` to `[experts, T, out]`, all of one dtype. Rows of
        zeros (tokens that did not choose this expert) are skipped."""
        if not self.used:
            self._prepack(self.detach().mT)
        out = x.new_zeros(*x.shape[:-1], self.shape[-1])
        for expert, places in enumerate(x.any(dim=-1)):
            if places.any():
                out[expert, places] = self.used[expert].project(x[expert, places])
        return out

    def _prepack(self, matrices: torch.Tensor) -> None:
        """Prepack matrices `[experts, out, in]`."""
        self.used = [CaughtMatrix.from_weight(matrix, is_copied=False) for matrix in matrices]
        for each in self.used:
            each.linear()
