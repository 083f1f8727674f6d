"""`GroupedWeight`: a weight that is kept as whole numbers of a few bits, in groups of inputs that share a scale.

To a model it is a parameter like any other: whatever is done with it, is done with the values that it stands for, which
is the definition that our kernels are held to. `prepack_linears` finds such parameters and lets a kernel multiply with
the numbers as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from inflight.execution.kernels import PANEL_OUTPUTS

CHUNK = 32
"""Inputs that are multiplied at a time."""
ROWS_AT_ONCE = 8192
"""Rows that are laid out at a time."""
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """How numbers and scales lie: `kernels/grouped.h`.

    Attributes:
        bits: of a number.
        coarse: inputs that share a coarse scale, a multiple of `CHUNK`.
        fine: fine scales, whole numbers, of each `CHUNK` inputs: 0, 1 or 2.
        has_minima: whether a minimum is subtracted, too.
        middle: the number that stands for 0 where there are no minima.
    """

    bits: int
    coarse: int
    fine: int = 0
    has_minima: bool = False
    middle: int = 0

    @property
    def words(self) -> list[int]:
        """As the kernels take it."""
        return [self.bits, self.coarse, self.fine, int(self.has_minima), self.middle]


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight `[out, in]` in parts: `(number - middle) * scale - minimum`, where a scale is a coarse one, or the
    product of a coarse and a fine one, and so is a minimum. `in` is a multiple of `CHUNK`, except in `numbers`.

    Attributes:
        numbers: `[out, in]` uint8.
        coarse: `[out, runs]` float16, for `layout.coarse` inputs each.
        fine: `[out, in / 32 * layout.fine]` int8.
        coarse_minima: `[out, runs]` float16.
        fine_minima: `[out, in / 32]` int8.
    """

    layout: GroupedLayout
    numbers: torch.Tensor
    coarse: torch.Tensor
    fine: torch.Tensor | None = None
    coarse_minima: torch.Tensor | None = None
    fine_minima: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The weight `[out, in]` float32: the definition."""
        num_inputs, layout = self.numbers.shape[1], self.layout
        scales = _spread(self.coarse, layout.coarse, self.fine, CHUNK // max(1, layout.fine), num_inputs)
        weight = (self.numbers.float() - layout.middle) * scales
        if self.coarse_minima is None:
            return weight
        return weight - _spread(self.coarse_minima, layout.coarse, self.fine_minima, CHUNK, num_inputs)

    def panels(self) -> torch.Tensor:
        """In the layout of `kernels/grouped.h`, `[out / 32, bytes]` uint8."""
        missing = -self.numbers.shape[1] % self.layout.coarse // CHUNK  # chunks
        parts = (self.numbers, self.coarse, self.fine, self.coarse_minima, self.fine_minima)
        numbers, coarse, fine, coarse_minima, fine_minima = (
            each if each is None else each.contiguous() for each in parts
        )
        if missing and fine is not None:
            fine = functional.pad(fine, (0, missing * self.layout.fine))
        if missing and fine_minima is not None:
            fine_minima = functional.pad(fine_minima, (0, missing))
        packed: torch.Tensor = torch.ops.inflight.pack_grouped(
            self.layout.words, numbers, coarse, fine, coarse_minima, fine_minima
        )
        return packed


def _spread(coarse: torch.Tensor, run: int, fine: torch.Tensor | None, group: int, num_inputs: int) -> torch.Tensor:
    """Scales (or minima) of all inputs: `[out, in]` float32."""
    spread = coarse.float().repeat_interleave(run, dim=1)[:, :num_inputs]
    return spread if fine is None else spread * fine.float().repeat_interleave(group, dim=1)[:, :num_inputs]


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Reads rows of a weight `[out, in]` in groups.

    Attributes:
        words: of its layout.
        panels: `[out / 32, bytes]` uint8.
        dtype: of the rows.
        scales: None: what is read was not rounded for it.
    """

    words: list[int]
    panels: torch.Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    scales: None = None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers: `[…]` int64 to `[…, in]`."""
        rows: torch.Tensor = torch.ops.inflight.grouped_rows(
            self.words, self.panels, numbers.flatten(), self.out_features, self.in_features, self.dtype
        )
        return rows.view(*numbers.shape, self.in_features)


class GroupedWeight(torch.Tensor):
    """A weight `[out, in]`, or one `[experts, out, in]` for each expert, float32 or bfloat16 to those who use it; or
    the transposed one.

    Attributes:
        kind: what the numbers are called in the format that they come from, such as "Q4_K".
        panels: `[out / 32, bytes]` uint8, one for each matrix.
        is_transposed: whether the last two dimensions are swapped.
    """

    kind: str
    grouping: GroupedLayout
    panels: tuple[torch.Tensor, ...]
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        kind: str,
        grouping: GroupedLayout,
        panels: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        is_transposed: bool = False,
    ) -> "GroupedWeight":
        """From panels of matrices; `shape` is `[out, in]` or `[experts, out, in]`."""
        seen = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else tuple(shape)
        with torch.inference_mode(False):  # so that views of it may be made inside and outside of inference mode
            made: GroupedWeight = torch.Tensor._make_wrapper_subclass(
                cls, seen, dtype=dtype, device=torch.device("cpu")
            )
        made.kind, made.grouping, made.panels, made.is_transposed = kind, grouping, tuple(panels), is_transposed
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls, kind: str, matrices: Sequence[Groups], dtype: torch.dtype, *, is_stacked: bool) -> "GroupedWeight":
        """From the groups of one matrix, or of one for each expert, all of the same sizes."""
        panels = [each.panels() for each in matrices]
        shape = matrices[0].numbers.shape
        return cls(kind, matrices[0].layout, panels, (len(panels), *shape) if is_stacked else shape, dtype)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """`out` and `in` of a matrix."""
        first, second = self.shape[-2:]
        return (second, first) if self.is_transposed else (first, second)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.nbytes for each in self.panels)

    def values(self) -> torch.Tensor:
        """The weight as an ordinary tensor."""
        words, sizes = self.grouping.words, self.matrix_shape
        matrices = [torch.ops.inflight.grouped_values(words, each, *sizes, self.dtype) for each in self.panels]
        weight: torch.Tensor = matrices[0] if self.dim() == 2 else torch.stack(matrices)
        return weight.mT if self.is_transposed else weight

    @property
    def stored_rows(self) -> "GroupedRows":
        """What reads the rows of a weight `[out, in]`."""
        return GroupedRows(self.grouping.words, self.panels[0], *self.matrix_shape, self.dtype)

    def like(self, **changes: Any) -> "GroupedWeight":
        """The same with other panels, another shape (before it is transposed) or another dtype."""
        before = {
            "panels": self.panels,
            "shape": (*self.shape[:-2], *self.matrix_shape),
            "dtype": self.dtype,
            "is_transposed": self.is_transposed,
        }
        return GroupedWeight(self.kind, self.grouping, **{**before, **changes})

    def joins(self, other: object) -> bool:
        """Whether another weight `[out, in]` can lie below this one, in the same panels."""
        return (
            isinstance(other, GroupedWeight)
            and (self.kind, self.grouping, self.dtype, self.matrix_shape[1])
            == (other.kind, other.grouping, other.dtype, other.matrix_shape[1])
            and (self.dim(), self.is_transposed) == (other.dim(), other.is_transposed) == (2, False)
            and self.matrix_shape[0] % PANEL_OUTPUTS == 0
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"GroupedWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What does not look at single elements keeps the numbers as they are; everything else sees the values."""
        kwargs = kwargs or {}
        kept = KEPT.get(function)
        result = kept(*args, **kwargs) if kept else None
        if result is not None:
            return result
        if function._schema.is_mutable and isinstance(args[0], GroupedWeight):
            raise RuntimeError(f"a weight in groups ({args[0].kind}) cannot be changed in place")
        args, kwargs = tree_map(as_values, (args, kwargs))
        return function(*args, **kwargs)


def as_values(weight: torch.Tensor) -> torch.Tensor:
    """A weight as an ordinary tensor, which it may be already."""
    return weight.values() if isinstance(weight, GroupedWeight) else weight


def _same(weight: GroupedWeight, *args: Any, **kwargs: Any) -> GroupedWeight:
    return weight.like()


def _converted(weight: GroupedWeight, **kwargs: Any) -> GroupedWeight | None:
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or weight.dtype
    if (device is not None and torch.device(device).type != "cpu") or dtype not in (torch.float32, torch.bfloat16):
        return None
    return weight.like(dtype=dtype)


def _transposed(weight: GroupedWeight, *dims: int) -> GroupedWeight | None:
    if dims and {dim % weight.dim() for dim in dims} != {weight.dim() - 2, weight.dim() - 1}:
        return None
    return weight.like(is_transposed=not weight.is_transposed)


def _permuted(weight: GroupedWeight, dims: Sequence[int]) -> GroupedWeight | None:
    straight = list(range(weight.dim()))
    swapped = [*straight[:-2], straight[-1], straight[-2]]
    return _transposed(weight) if [dim % weight.dim() for dim in dims] == swapped else None


def _matrix(weight: GroupedWeight, dim: int, index: int) -> GroupedWeight | None:
    if weight.dim() != 3 or dim != 0:
        return None
    return weight.like(panels=weight.panels[index : index + 1 or None], shape=weight.matrix_shape)


def _matrices(weight: GroupedWeight, dim: int = 0) -> list[GroupedWeight] | None:
    if weight.dim() != 3 or dim != 0:
        return None
    return [weight.like(panels=[each], shape=weight.matrix_shape) for each in weight.panels]


def _joined(weights: Sequence[Any], dim: int = 0) -> GroupedWeight | None:
    first = weights[0]
    if dim != 0 or not isinstance(first, GroupedWeight):
        return None
    if not all(above.joins(below) for above, below in pairwise(weights)):
        return None
    panels = torch.cat([each.panels[0] for each in weights])
    return first.like(panels=[panels], shape=(sum(each.shape[0] for each in weights), first.shape[1]))


def _embedded(weight: Any, indices: torch.Tensor, *args: Any) -> torch.Tensor | None:
    if not isinstance(weight, GroupedWeight) or weight.dim() != 2 or weight.is_transposed:
        return None
    return weight.stored_rows.rows(indices.long())


KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.lift_fresh.default: _same,
    aten._to_copy.default: _converted,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.select.int: _matrix,
    aten.unbind.int: _matrices,
    aten.cat.default: _joined,
    aten.embedding.default: _embedded,
}
"""Operators that keep numbers as they are. One that cannot, for these arguments, gives None."""
