"""`RowKernel`: small operators that run as one, row by row, with their results in registers.

A row is the last dimension of a tensor; the kernel's space is all dimensions before it. An operator can join a kernel
if its result has a row for each place of the space, in whatever order of dimensions: heads before tokens, say. What it
reads is then a register or a part of one, or a row in memory. Each instruction rounds as torch's operator does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import torch

from inflight.execution.graph.graph import ONE, Call, Size, View

DTYPES = (torch.float32, torch.bfloat16)
MAX_ROW = 2**15
"""Elements: the registers of longer rows would leave the cache."""
MIN_SUM = 8
"""Shorter rows are summed in another way by torch."""


class Opcode(IntEnum):
    """As in `kernels/row_kernel.h`."""

    LOAD = 0
    STORE = 1
    COPY = 2
    ADD = 3
    SUBTRACT = 4
    MULTIPLY = 5
    DIVIDE = 6
    NEGATE = 7
    SQUARE = 8
    SQUARE_ROOT = 9
    RECIPROCAL_ROOT = 10
    SUM = 11
    ACTIVATE = 12


UNARY = {"aten::neg": Opcode.NEGATE, "aten::rsqrt": Opcode.RECIPROCAL_ROOT, "aten::sqrt": Opcode.SQUARE_ROOT}
BINARY = {
    "aten::add.Tensor": Opcode.ADD,
    "aten::sub.Tensor": Opcode.SUBTRACT,
    "aten::mul.Tensor": Opcode.MULTIPLY,
    "aten::div.Tensor": Opcode.DIVIDE,
}
SUM = "aten::sum.dim_IntList"


class CannotJoinError(Exception):
    """An operator cannot be a part of a kernel."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A register from an offset on, or one number for a whole row."""

    register: int
    offset: int = 0
    is_single: bool = False


NOTHING = Operand(0, is_single=True)
"""An operand that an instruction has no use for."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory: where that of each place begins."""

    value: int
    dtype: torch.dtype
    offset: Size
    strides: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `rounds` is whether its result becomes bfloat16."""

    code: Opcode
    length: int
    to: Operand = NOTHING
    a: Operand = NOTHING
    b: Operand = NOTHING
    rounds: bool = False
    rows: Rows | None = None
    activation: tuple[str, str] = ("", "")

    def makes(self, register: int) -> bool:
        """Whether it writes into a register."""
        return self.code is not Opcode.STORE and self.to.register == register


@dataclass(frozen=True, slots=True)
class Held:
    """A value that is in a register: the strides that its tensor has in each dimension of the space, and its dtype."""

    register: int
    dtype: torch.dtype
    length: int
    strides: tuple[Size, ...]


@dataclass(slots=True)
class RowKernel:
    """A kernel as it grows.

    Attributes:
        space: rows in each dimension.
        lengths: elements of each register.
        constants: numbers in registers.
        held: the values that it has made, which are in registers.
    """

    space: tuple[Size, ...]
    lengths: list[int] = field(default_factory=list)
    constants: dict[float, int] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    _loaded: dict[tuple[Rows, int], int] = field(default_factory=dict)

    def join(self, call: Call) -> None:
        """Make a call a part of the kernel. Raises `CannotJoinError`, and then nothing has changed."""
        kept = len(self.lengths), dict(self.constants), len(self.instructions), dict(self._loaded)
        try:
            _Joining(self, call).run()
        except CannotJoinError:
            del self.lengths[kept[0] :]
            self.constants, self._loaded = kept[1], kept[3]
            del self.instructions[kept[2] :]
            raise

    def new_register(self, length: int) -> int:
        """The number of a register."""
        self.lengths.append(length)
        return len(self.lengths) - 1

    def load(self, rows: Rows, length: int) -> int:
        """The register with rows in memory."""
        key = rows, length
        if key not in self._loaded:
            self._loaded[key] = self.new_register(length)
            self.instructions.append(Instruction(Opcode.LOAD, length, Operand(self._loaded[key]), rows=rows))
        return self._loaded[key]

    def constant(self, number: float) -> Operand:
        """The register with a number."""
        if number not in self.constants:
            self.constants[number] = self.new_register(1)
        return Operand(self.constants[number], is_single=True)

    def stores(self, values: Sequence[int]) -> list[Instruction]:
        """What writes values to memory."""
        stores = []
        for value in values:
            held = self.held[value]
            rows = Rows(value, held.dtype, Size(0), held.strides)
            stores.append(Instruction(Opcode.STORE, held.length, a=Operand(held.register), rows=rows))
        return stores

    def numel(self, value: int) -> Size:
        """Elements of a value in memory."""
        return _product((*self.space, Size(self.held[value].length)))


def space_of(view: View) -> tuple[Size, ...]:
    """The space of the kernel that begins with a call that has this output."""
    return tuple(size for size in view.sizes[:-1] if size != ONE)


def can_begin(call: Call) -> bool:
    """Whether a call could be a part of a kernel."""
    return call.name in _EMITTERS and len(call.outputs) == 1 and len(call.outputs[0].sizes) > 0


class _Joining:
    """A call that becomes part of a kernel."""

    def __init__(self, kernel: RowKernel, call: Call) -> None:
        self.kernel, self.call = kernel, call
        self.output = call.outputs[0]
        *outer, last = self.output.sizes
        if self.output.dtype not in DTYPES or not last.is_fixed or not 0 < last.fixed <= MAX_ROW:
            raise CannotJoinError
        if last.fixed > 1 and self.output.strides[-1] != ONE:
            raise CannotJoinError
        _product((*kernel.space, last))  # which is what it takes in memory
        self.length = last.fixed
        self.dims = [dim for dim, size in enumerate(outer) if size != ONE]
        self.place_of = self._places()

    def run(self) -> None:
        """Add its instructions."""
        register = _EMITTERS[self.call.name](self)
        strides = [Size(0)] * len(self.kernel.space)
        for dim, place in self.place_of.items():
            strides[place] = self.output.strides[dim]
        self.kernel.held[self.output.value] = Held(register, self.output.dtype, self.length, tuple(strides))

    @property
    def rounds(self) -> bool:
        """Whether results are rounded to bfloat16."""
        return self.output.dtype == torch.bfloat16

    def emit(self, code: Opcode, length: int, a: Operand, b: Operand = NOTHING, **options: Any) -> int:
        """Add an instruction; returns the register of its result."""
        is_single = code is Opcode.SUM
        to = self.kernel.new_register(1 if is_single else length)
        self.kernel.instructions.append(Instruction(code, length, Operand(to, is_single=is_single), a, b, **options))
        return to

    def operand(self, argument: Any) -> Operand:
        """A tensor or a number of the call."""
        if isinstance(argument, Size) and argument.is_fixed:
            return self.kernel.constant(float(argument.fixed))
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            return self.kernel.constant(float(argument))
        if not isinstance(argument, View) or argument.is_opaque:
            raise CannotJoinError
        length = self._length_of(argument)
        held = self.kernel.held.get(argument.value)
        if held is not None:
            offset, _ = self._part_of(argument, held)
            return Operand(held.register, offset, is_single=length == 1)
        strides = [Size(0)] * len(self.kernel.space)
        for dim, stride in self._outer(argument):
            strides[self.place_of[dim]] = stride
        if argument.dtype not in DTYPES:
            raise CannotJoinError
        rows = Rows(argument.value, argument.dtype, argument.offset, tuple(strides))
        return Operand(self.kernel.load(rows, length), is_single=length == 1)

    def _places(self) -> dict[int, int]:
        """For each dimension of the output but the last, its place in the space; those of size 1 have none."""
        places: dict[int, int] = {}
        for view in self.call.inputs:
            held = self.kernel.held.get(view.value)
            if held is None:
                continue
            for dim, place in self._part_of(view, held)[1].items():
                if places.setdefault(dim, place) != place:
                    raise CannotJoinError
        left = [dim for dim in self.dims if dim not in places]
        free = [place for place in range(len(self.kernel.space)) if place not in places.values()]
        if len(left) != len(free) or len(set(places.values())) != len(places):
            raise CannotJoinError
        for dim, place in zip(left, free, strict=True):
            if self.output.sizes[dim] != self.kernel.space[place]:
                raise CannotJoinError
            places[dim] = place
        return places

    def _part_of(self, view: View, held: Held) -> tuple[int, dict[int, int]]:
        """Where a view of a value in a register begins, and the places of its dimensions."""
        if view.dtype != held.dtype or not view.offset.is_fixed:
            raise CannotJoinError
        length = self._length_of(view)
        if view.offset.fixed + length > held.length:
            raise CannotJoinError
        places = {}
        for dim, stride in self._outer(view):
            size = self.output.sizes[dim]
            pairs = zip(held.strides, self.kernel.space, strict=True)
            found = [place for place, pair in enumerate(pairs) if pair == (stride, size)]
            if len(found) != 1:
                raise CannotJoinError
            places[dim] = found[0]
        if len(places) != len(self.kernel.space):  # it is the row of one place, for all
            raise CannotJoinError
        return view.offset.fixed, places

    def _length_of(self, view: View) -> int:
        """Elements of a row of an input."""
        if not view.sizes:
            return 1
        last = view.sizes[-1]
        if not last.is_fixed or (last != ONE and view.strides[-1] != ONE):
            raise CannotJoinError
        return last.fixed

    def _outer(self, view: View) -> list[tuple[int, Size]]:
        """The dimensions of an input before the last that are not broadcast: each as one of the output, and its
        stride."""
        shift = len(self.output.sizes) - len(view.sizes)
        outer = []
        for dim, (size, stride) in enumerate(zip(view.sizes[:-1], view.strides[:-1], strict=True), shift):
            if size == ONE:
                continue
            if dim < 0 or self.output.sizes[dim] != size:
                raise CannotJoinError
            outer.append((dim, stride))
        return outer


_Emitter: TypeAlias = Callable[[_Joining], int]


def _unary(joining: _Joining) -> int:
    operand = joining.operand(joining.call.arguments[0])
    return joining.emit(UNARY[joining.call.name], joining.length, operand, rounds=joining.rounds)


def _binary(joining: _Joining) -> int:
    a, b, *others = joining.call.arguments
    if others and others[0] not in (1, ONE):  # a factor of the second
        raise CannotJoinError
    first, second = joining.operand(a), joining.operand(b)
    return joining.emit(BINARY[joining.call.name], joining.length, first, second, rounds=joining.rounds)


def _square(joining: _Joining) -> int:
    base, exponent = joining.call.arguments
    if exponent not in (2, 2.0, Size(2)):
        raise CannotJoinError
    return joining.emit(Opcode.SQUARE, joining.length, joining.operand(base), rounds=joining.rounds)


def _cast(joining: _Joining) -> int:
    operand = joining.operand(joining.call.arguments[0])
    if not joining.rounds and operand.offset == 0:
        return operand.register  # registers are float32
    return joining.emit(Opcode.COPY, joining.length, operand, rounds=joining.rounds)


def _activate(joining: _Joining) -> int:
    x, *activation = joining.call.arguments
    operand = joining.operand(x)
    return joining.emit(Opcode.ACTIVATE, joining.length, operand, rounds=joining.rounds, activation=tuple(activation))


def _mean(joining: _Joining) -> int:
    """A sum of rows, or their mean."""
    view, dims, keeps_dim, dtype = joining.call.arguments
    is_last = dims in ((Size(-1),), (Size(len(view.sizes) - 1),))
    length = view.sizes[-1].fixed
    is_plain = dtype in (None, torch.float32) and view.dtype == torch.float32
    if not (is_last and keeps_dim and is_plain and view.sizes[-1].is_fixed and MIN_SUM <= length <= MAX_ROW):
        raise CannotJoinError
    total = joining.emit(Opcode.SUM, length, joining.operand(view))
    if joining.call.name == SUM:
        return total
    divisor = joining.kernel.constant(float(length))
    return joining.emit(Opcode.DIVIDE, 1, Operand(total, is_single=True), divisor)


def _concatenate(joining: _Joining) -> int:
    parts, dim = joining.call.arguments
    if dim not in (Size(-1), Size(len(joining.output.sizes) - 1)):
        raise CannotJoinError
    parts = [part for part in parts if part.sizes[-1] != Size(0)]
    operands = [joining.operand(part) for part in parts]
    to, offset = joining.kernel.new_register(joining.length), 0
    for part, operand in zip(parts, operands, strict=True):
        length = part.sizes[-1].fixed
        place = Operand(to, offset)
        joining.kernel.instructions.append(
            Instruction(Opcode.COPY, length, place, Operand(operand.register, operand.offset))
        )
        offset += length
    return to


_EMITTERS: dict[Any, _Emitter] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(("aten::to.dtype", "aten::_to_copy"), _cast),
    "aten::pow.Tensor_Scalar": _square,
    "aten::mean.dim": _mean,
    SUM: _mean,
    "aten::cat": _concatenate,
    "inflight::activate": _activate,
}


def _product(sizes: Sequence[Size]) -> Size:
    """A product in which at most one factor grows. Raises `CannotJoinError` if several do."""
    product = ONE
    for size in sizes:
        if not product.is_fixed and not size.is_fixed:
            raise CannotJoinError
        fixed, growing = (product.fixed, size) if product.is_fixed else (size.fixed, product)
        product = Size(fixed * growing.fixed, fixed * growing.per_token, fixed * growing.per_logit_row)
    return product
