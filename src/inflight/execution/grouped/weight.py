"""`GroupedWeight`: a weight of integers of a few bits, in groups of inputs that share a scale.

To a model it is an ordinary parameter: operations use its dequantized values, the definition for our kernels.
`prepack_linears` finds such parameters and lets a kernel multiply with the numbers directly.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from inflight.execution.kernels import PANEL_OUTPUTS
from inflight.execution.mapped_memory import new_weight
from inflight.execution.plain_linear import plain_linear

CHUNK = 32
"""Inputs that are multiplied at a time."""
BYTES_AT_ONCE = 2**22
"""Most bytes of dequantized values during a product, in reused memory."""
TABLES = {
    "e2m1": (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0),
    "nonlinear": (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241),
    "lattice2": (21, 39, 55, 56, 57, 63, 64, 64, 64, 64, 65, 71, 72, 73, 89, 107),
    "lattice3": (2, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108, 116, 126),
    "odd": tuple(range(1, 32, 2)),
}
"""Lookup tables of four-bit numbers: "e2m1", the floats of MXFP4, doubled, around 12; of GGUF's types: "nonlinear",
`IQ4_NL`'s values, around 128; "lattice2" (`IQ1`, `IQ2`) and "lattice3" (`IQ3_XXS`), around 64; "odd" (`IQ3_S`), around
16."""
CODES = ("whole", "e4m3", "e2m1", "nonlinear", "lattice2", "lattice3", "odd")
"""Interpretations of numbers: integers; 8-bit floats (`float8_e4m3fn`); entries of `TABLES`."""
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """The layout of numbers and scales: `kernels/grouped.h`.

    Attributes:
        bits: of a number.
        coarse: inputs that share a coarse scale, a multiple of `CHUNK`.
        fine: fine scales, integers, of each `CHUNK` inputs: 0, 1 or 2.
        has_minima: whether a minimum is subtracted, too.
        middle: subtracted from a number's value.
        has_wide_scales: whether coarse scales and minima are float32 instead of float16.
        code: the interpretation of a number, one of `CODES`.
    """

    bits: int
    coarse: int
    fine: int = 0
    has_minima: bool = False
    middle: int = 0
    has_wide_scales: bool = False
    code: str = "whole"

    @property
    def has_integers(self) -> bool:
        """Whether its numbers can be multiplied with integers."""
        return self.code != "e4m3"

    @property
    def words(self) -> list[int]:
        """As the kernels take it."""
        scale_bytes = 4 if self.has_wide_scales else 2
        code = CODES.index(self.code)
        return [self.bits, self.coarse, self.fine, int(self.has_minima), self.middle, scale_bytes, code]


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight `[out, in]` in parts: `(number - middle) * scale - minimum`, where a scale is a coarse one, or the
    product of a coarse and a fine one, and so is a minimum. `in` is a multiple of `CHUNK`, except in `numbers`.

    Attributes:
        numbers: `[out, in]` uint8.
        coarse: `[out, runs]` float16 or float32, for `layout.coarse` inputs each.
        fine: `[out, in / 32 * layout.fine]` int8.
        coarse_minima: `[out, runs]`, like `coarse`.
        fine_minima: like `fine`.
        order: `[in]` int64, the input of each column; None: in order.
    """

    layout: GroupedLayout
    numbers: torch.Tensor
    coarse: torch.Tensor
    fine: torch.Tensor | None = None
    coarse_minima: torch.Tensor | None = None
    fine_minima: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are."""
        given = (each for each in (self.coarse, self.coarse_minima) if each is not None)
        return all(bool(each.isfinite().all()) for each in given)

    def values(self) -> torch.Tensor:
        """The weight `[out, in]` float32: the definition."""
        num_inputs, layout = self.numbers.shape[1], self.layout
        group = CHUNK // max(1, layout.fine)
        scales = _spread(self.coarse, layout.coarse, self.fine, group, num_inputs)
        weight = (self._decoded() - layout.middle) * scales
        if self.coarse_minima is not None:
            weight -= _spread(self.coarse_minima, layout.coarse, self.fine_minima, group, num_inputs)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def _decoded(self) -> torch.Tensor:
        """The values of the numbers, `[out, in]` float32."""
        if self.layout.code == "e4m3":
            return self.numbers.view(torch.float8_e4m3fn).float()
        if self.layout.code in TABLES:
            return torch.tensor(TABLES[self.layout.code], dtype=torch.float32)[self.numbers.int()]
        return self.numbers.float()

    def packed(self) -> "PackedMatrix":
        """In the layout of `kernels/grouped.h`."""
        missing = -self.numbers.shape[1] % self.layout.coarse // CHUNK  # chunks
        parts = (self.numbers, self.coarse, self.fine, self.coarse_minima, self.fine_minima)
        numbers, coarse, fine, coarse_minima, fine_minima = (
            each if each is None else each.contiguous() for each in parts
        )
        if missing and fine is not None:
            fine = functional.pad(fine, (0, missing * self.layout.fine))
        if missing and fine_minima is not None:
            fine_minima = functional.pad(fine_minima, (0, missing * self.layout.fine))
        panels = torch.ops.inflight.pack_grouped(self.layout.words, numbers, coarse, fine, coarse_minima, fine_minima)
        return PackedMatrix(panels, self.order)


def _spread(coarse: torch.Tensor, run: int, fine: torch.Tensor | None, group: int, num_inputs: int) -> torch.Tensor:
    """Scales (or minima) of all inputs: `[out, in]` float32.

    Args:
        coarse: `[out, runs]` float, one for each `run` inputs.
        fine: `[out, num_inputs / group]` int8, factors of groups of inputs.
    """
    spread = coarse.float().repeat_interleave(run, dim=1)[:, :num_inputs]
    return spread if fine is None else spread * fine.float().repeat_interleave(group, dim=1)[:, :num_inputs]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight `[out, in]` in memory.

    Attributes:
        panels: `[out / 32, bytes]` uint8, in the layout of `kernels/grouped.h`.
        order: see `Groups`.
    """

    panels: torch.Tensor
    order: torch.Tensor | None = None

    def in_order(self, columns: torch.Tensor) -> torch.Tensor:
        """The columns of `[…, in]`, of any dtype, where the inputs are."""
        return columns if self.order is None else columns[..., self.order.argsort()]

    def joins(self, other: "PackedMatrix") -> bool:
        """Whether another one reads the inputs in the same order."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Reads rows of a weight `[out, in]` in groups.

    Attributes:
        words: of its layout.
        dtype: of the rows.
        scales: always None: the rows are already scaled.
    """

    words: list[int]
    matrix: PackedMatrix
    out_features: int
    in_features: int
    dtype: torch.dtype
    scales: None = None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers: `[…]` int64 to `[…, in]`."""
        rows: torch.Tensor = torch.ops.inflight.grouped_rows(
            self.words, self.matrix.panels, numbers.flatten(), self.out_features, self.in_features, self.dtype
        )
        return self.matrix.in_order(rows).view(*numbers.shape, self.in_features)


class GroupedWeight(torch.Tensor):
    """A weight `[out, in]`, or `[experts, out, in]`, of nominal dtype float32 or bfloat16; perhaps transposed.

    Attributes:
        kind: the name of the original format, such as "Q4_K".
        matrices: one, or one for each expert.
        is_transposed: whether the last two dimensions are swapped.
    """

    kind: str
    grouping: GroupedLayout
    matrices: tuple[PackedMatrix, ...]
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        kind: str,
        grouping: GroupedLayout,
        matrices: Sequence[PackedMatrix],
        shape: Sequence[int],
        dtype: torch.dtype,
        is_transposed: bool = False,
    ) -> "GroupedWeight":
        """`shape` is `[out, in]` or `[experts, out, in]`."""
        seen = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else tuple(shape)
        with torch.inference_mode(False):  # so that views of it may be made inside and outside of inference mode
            made: GroupedWeight = torch.Tensor._make_wrapper_subclass(
                cls, seen, dtype=dtype, device=torch.device("cpu")
            )
        made.kind, made.grouping, made.matrices, made.is_transposed = kind, grouping, tuple(matrices), is_transposed
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def from_groups(
        cls, kind: str, matrices: Sequence[Groups], dtype: torch.dtype, *, is_stacked: bool
    ) -> "GroupedWeight":
        """Make a weight from the groups of one matrix, or of one per expert, all of the same sizes."""
        packed = [each.packed() for each in matrices]
        shape = matrices[0].numbers.shape
        return cls(kind, matrices[0].layout, packed, (len(packed), *shape) if is_stacked else shape, dtype)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """`out` and `in` of a matrix."""
        first, second = self.shape[-2:]
        return (second, first) if self.is_transposed else (first, second)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.panels.nbytes for each in self.matrices)

    def values(self) -> torch.Tensor:
        """The dequantized weight, `[out, in]` or `[experts, out, in]` (transposed if this is), in the nominal dtype."""
        words, sizes = self.grouping.words, self.matrix_shape
        matrices = [
            each.in_order(torch.ops.inflight.grouped_values(words, each.panels, *sizes, self.dtype))
            for each in self.matrices
        ]
        weight: torch.Tensor = matrices[0] if self.dim() == 2 else torch.stack(matrices)
        return weight.mT if self.is_transposed else weight

    @property
    def stored_rows(self) -> "GroupedRows":
        """A reader of the rows of a weight `[out, in]`."""
        return GroupedRows(self.grouping.words, self.matrices[0], *self.matrix_shape, self.dtype)

    def like(self, **changes: Any) -> "GroupedWeight":
        """The same with other matrices, another shape (before it is transposed) or another dtype."""
        before = {
            "matrices": self.matrices,
            "shape": (*self.shape[:-2], *self.matrix_shape),
            "dtype": self.dtype,
            "is_transposed": self.is_transposed,
        }
        return GroupedWeight(self.kind, self.grouping, **{**before, **changes})

    def is_like(self, other: object) -> bool:
        """Whether another weight has the same format, except for the number of rows."""
        return isinstance(other, GroupedWeight) and (
            (self.kind, self.grouping, self.dtype, self.matrix_shape[1], self.shape[:-2], self.is_transposed)
            == (other.kind, other.grouping, other.dtype, other.matrix_shape[1], other.shape[:-2], other.is_transposed)
        )

    def joins(self, other: object) -> bool:
        """Whether another weight's matrices can be appended to this one's rows, in the same panels."""
        return (
            isinstance(other, GroupedWeight)
            and self.is_like(other)
            and self.matrix_shape[0] % PANEL_OUTPUTS == 0
            and all(above.joins(below) for above, below in zip(self.matrices, other.matrices, strict=True))
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"GroupedWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operators that do not read single elements keep the numbers; all others get the values."""
        kwargs = kwargs or {}
        kept = KEPT.get(function)
        result = kept(*args, **kwargs) if kept else None
        if result is not None:
            return result
        if function._schema.is_mutable and isinstance(args[0], GroupedWeight):
            raise RuntimeError(f"a weight in groups ({args[0].kind}) cannot be changed in place")
        args, kwargs = tree_map(as_values, (args, kwargs))
        return function(*args, **kwargs)


_watchers: list[Counter[str]] = []


@contextmanager
def watch_expansions() -> Iterator[Counter[str]]:
    """A context that counts, by kind, grouped weights that are dequantized."""
    seen: Counter[str] = Counter()
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


def as_values(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[…]` as an ordinary tensor of its shape and dtype, which it may be already."""
    if not isinstance(weight, GroupedWeight):
        return weight
    for seen in _watchers:
        seen[weight.kind] += 1
    return weight.values()


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


def _reversed(weight: GroupedWeight) -> GroupedWeight | None:
    return _transposed(weight) if weight.dim() == 2 else None


def _matrix(weight: GroupedWeight, dim: int, index: int) -> GroupedWeight | None:
    if weight.dim() != 3 or dim != 0:
        return None
    return weight.like(matrices=weight.matrices[index : index + 1 or None], shape=weight.matrix_shape)


def _matrices(weight: GroupedWeight, dim: int = 0) -> list[GroupedWeight] | None:
    if weight.dim() != 3 or dim != 0:
        return None
    return [weight.like(matrices=[each], shape=weight.matrix_shape) for each in weight.matrices]


def _stacked(weights: Sequence[Any], dim: int = 0) -> GroupedWeight | None:
    first = weights[0]
    if dim != 0 or not isinstance(first, GroupedWeight) or first.dim() != 2:
        return None
    if not all(first.is_like(each) and first.shape == each.shape for each in weights):
        return None
    matrices = [each.matrices[0] for each in weights]
    return first.like(matrices=matrices, shape=(len(matrices), *first.matrix_shape))


def _joined(weights: Sequence[Any], dim: int = 0) -> GroupedWeight | None:
    first = weights[0]
    if not isinstance(first, GroupedWeight) or dim % first.dim() != first.dim() - (1 if first.is_transposed else 2):
        return None
    if not all(isinstance(above, GroupedWeight) and above.joins(below) for above, below in pairwise(weights)):
        return None
    matrices = [
        PackedMatrix(_below_each_other([each.panels for each in parts]), parts[0].order)
        for parts in zip(*(each.matrices for each in weights), strict=True)
    ]
    num_rows = sum(each.matrix_shape[0] for each in weights)
    return first.like(matrices=matrices, shape=(*first.shape[:-2], num_rows, first.matrix_shape[1]))


def _split(weight: GroupedWeight, size: int, dim: int = 0) -> list[GroupedWeight] | None:
    """`torch.split` into whole panels, or whole groups of inputs."""
    sizes, kept = list(weight.matrix_shape), weight.dim() - 1 - dim % weight.dim()
    is_inputs = (kept == 0) is not weight.is_transposed
    step = weight.grouping.coarse if is_inputs else PANEL_OUTPUTS
    has_order = any(each.order is not None for each in weight.matrices)
    if kept > 1 or size % step or (is_inputs and has_order):
        return None
    parts = []
    for first in range(0, sizes[is_inputs], size):
        own = list(sizes)
        own[is_inputs] = min(size, sizes[is_inputs] - first)
        matrices = [
            replace(each, panels=_some_panels(each.panels, first, own[is_inputs], sizes[is_inputs], step, is_inputs))
            for each in weight.matrices
        ]
        parts.append(weight.like(matrices=matrices, shape=(*weight.shape[:-2], *own)))
    return parts


def _some_panels(panels: torch.Tensor, first: int, number: int, of: int, step: int, is_inputs: bool) -> torch.Tensor:
    """The part of panels `[out / 32, bytes]` uint8 with some outputs, or some inputs.

    Args:
        first, number, of: the first of them, how many, and how many the panels have.
        step: outputs or inputs that stay together; `first` is a multiple of it, and the last step may be partial.
    """
    bytes_of_step = panels.shape[1] // -(-of // step) if is_inputs else 1
    begin, end = (each // step * bytes_of_step for each in (first, first + number + step - 1))
    return (panels[:, begin:end] if is_inputs else panels[begin:end]).contiguous().clone()


def _below_each_other(panels: Sequence[torch.Tensor]) -> torch.Tensor:
    """All panels, `[out / 32, bytes]` uint8 each, as one tensor of these, without a copy if already adjacent."""
    first = panels[0]
    sizes = [each.numel() for each in panels]
    starts = [first.data_ptr() + sum(sizes[:number]) for number in range(len(panels))]
    storages = {each.untyped_storage().data_ptr() for each in panels}
    if len(storages) > 1 or [each.data_ptr() for each in panels] != starts:
        return torch.cat(list(panels), out=new_weight((sum(map(len, panels)), first.shape[1]), first.dtype))
    return first.as_strided((sum(map(len, panels)), first.shape[1]), first.stride())


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`functional.linear`, `[…, in]` to `[…, out]`, in pieces of the weight's rows."""
    if not isinstance(weight, GroupedWeight) or weight.dim() != 2 or weight.is_transposed:
        return None
    if _in_place.get():
        return _kernel_linear(x, weight, bias)
    num_outputs, num_inputs = weight.matrix_shape
    matrix, out = weight.matrices[0], x.new_empty(*x.shape[:-1], num_outputs)
    step = max(1, BYTES_AT_ONCE // (PANEL_OUTPUTS * num_inputs * x.itemsize))  # panels
    for first in range(0, len(matrix.panels), step):
        some = slice(first * PANEL_OUTPUTS, min((first + step) * PANEL_OUTPUTS, num_outputs))
        rows = replace(matrix, panels=matrix.panels[first : first + step])
        values = weight.like(matrices=[rows], shape=(some.stop - some.start, num_inputs)).values()
        out[..., some] = plain_linear(x, values, None if bias is None else bias[some])
    return out


_in_place: ContextVar[bool] = ContextVar("multiplied_in_place", default=False)


@contextmanager
def multiplied_in_place() -> Iterator[None]:
    """A context in which our kernel multiplies with the numbers, in exact arithmetic. It takes a fraction of the time,
    but rounds sums differently: for observing a run, not its results."""
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def _kernel_linear(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear`, `[…, in]` to `[…, out]`, by our kernel."""
    (num_outputs, num_inputs), matrix = weight.matrix_shape, weight.matrices[0]
    number = torch.ops.inflight.new_grouped_linear(
        *(matrix.panels, weight.grouping.words, matrix.order, True, bias, num_inputs, num_outputs, "none", "none")
    )
    try:
        out: torch.Tensor = torch.ops.inflight.linear(x, number, num_outputs)
        return out
    finally:
        torch.ops.inflight.delete_linear(number)


def _multiplied(x: torch.Tensor, weight: Any) -> torch.Tensor | None:
    """`[T, in]` times a weight `[in, out]`."""
    return _linear(x, weight.T) if isinstance(weight, GroupedWeight) else None


def _embedded(weight: Any, indices: torch.Tensor, *args: Any) -> torch.Tensor | None:
    """The rows `[…, in]` of a weight at `indices` `[…]`, integers."""
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
    aten.mT.default: _transposed,
    aten.numpy_T.default: _reversed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.select.int: _matrix,
    aten.unbind.int: _matrices,
    aten.split.Tensor: _split,
    aten.stack.default: _stacked,
    aten.cat.default: _joined,
    aten.embedding.default: _embedded,
    aten.linear.default: _linear,
    aten.mm.default: _multiplied,
    aten.matmul.default: _multiplied,
}
"""Operators that keep numbers as they are. One that cannot, for these arguments, gives None."""
