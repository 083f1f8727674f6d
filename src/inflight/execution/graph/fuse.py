"""Fuses small operators into row kernels: they run row by row, with their results in registers.

A row is the last dimension of a tensor; a kernel's space is all dimensions before it. A node can be fused into a kernel
if its result has a row for each place of the space, in any order of dimensions, such as heads before tokens. It then
reads a register or a part of one, or a row in memory. Each instruction rounds as torch's operator does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from inflight.execution.graph.graph import Graph, Node
from inflight.execution.graph.program import (
    ONE,
    UNUSED,
    Constant,
    Instruction,
    Opcode,
    Operand,
    Output,
    RowKernel,
    Rows,
    Size,
    View,
)

DTYPES = (torch.float32, torch.bfloat16)
MAX_ROW = 2**15
"""Elements: the registers of longer rows would leave the cache."""
MIN_SUM = 8
"""Torch sums shorter rows differently."""

ELEMENTWISE = {
    "aten::neg": Opcode.NEGATE,
    "aten::rsqrt": Opcode.RECIPROCAL_ROOT,
    "aten::sqrt": Opcode.SQUARE_ROOT,
    "aten::add.Tensor": Opcode.ADD,
    "aten::sub.Tensor": Opcode.SUBTRACT,
    "aten::mul.Tensor": Opcode.MULTIPLY,
    "aten::div.Tensor": Opcode.DIVIDE,
}
ACTIVATIONS = {
    ("relu", "none"): Opcode.RELU,
    ("swish", "none"): Opcode.SWISH,
    ("gelu", "none"): Opcode.GELU,
    ("gelu", "tanh"): Opcode.GELU_TANH,
}
SUM = "aten::sum.dim_IntList"


class CannotFuseError(Exception):
    """A node cannot be part of a kernel."""


@dataclass(frozen=True, slots=True)
class Held:
    """A value in a register: its tensor's strides in each dimension of the space, and its dtype."""

    register: int
    dtype: torch.dtype
    length: int
    strides: tuple[Size, ...]


@dataclass(slots=True)
class FusedNode:
    """A row kernel under construction.

    Attributes:
        space: rows in each dimension.
        lengths: elements of each register.
        constants: the register of each number.
        held: its computed values, in registers.
    """

    space: tuple[Size, ...]
    lengths: list[int] = field(default_factory=list)
    constants: dict[float, int] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    _loaded: dict[tuple[Rows, int], int] = field(default_factory=dict)

    def fuse(self, node: Node) -> bool:
        """Fuse a node into the kernel. Returns False, changing nothing, if impossible."""
        kept = len(self.lengths), dict(self.constants), len(self.instructions), dict(self._loaded)
        try:
            _Fusing(self, node).run()
        except CannotFuseError:
            del self.lengths[kept[0] :]
            self.constants, self._loaded = kept[1], kept[3]
            del self.instructions[kept[2] :]
            return False
        return True

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

    def row_kernel(self, to_store: Sequence[int]) -> RowKernel:
        """Build the kernel, which stores these values once computed."""
        instructions, outputs = list(self.instructions), []
        for value in to_store:
            held = self.held[value]
            outputs.append(Output(value, held.dtype, _product((*self.space, Size(held.length)))))
            rows = Rows(value, held.dtype, Size(0), held.strides)
            makers = [place for place, each in enumerate(instructions) if each.to.index == held.register]
            store = Instruction(Opcode.STORE, held.length, a=Operand(held.register), rows=rows)
            instructions.insert(makers[-1] + 1, store)
        registers, num_floats = self._allocate_registers(instructions)
        constants = tuple(Constant(register, number) for number, register in self.constants.items())
        return RowKernel(self.space, registers, num_floats, constants, tuple(outputs), tuple(instructions))

    def _allocate_registers(self, instructions: Sequence[Instruction]) -> tuple[tuple[int, ...], int]:
        """The offset of each register, in floats, and their total size. Registers with disjoint lifetimes share
        memory."""
        num_lanes: int = torch.ops.inflight.num_lanes()
        last_use: dict[int, int] = {}
        for place, each in enumerate(instructions):
            for operand in (each.to, each.a, each.b):
                last_use[operand.index] = place
        for register in self.constants.values():
            last_use[register] = len(instructions)
        places = [-1] * len(self.lengths)
        taken: list[tuple[int, int, int]] = []  # from, to, register

        def take(register: int) -> None:
            if places[register] >= 0:
                return
            length = -(-self.lengths[register] // num_lanes) * num_lanes + num_lanes
            start = 0
            for begin, end, _ in sorted(taken):
                if begin - start >= length:
                    break
                start = max(start, end)
            places[register] = start
            taken.append((start, start + length, register))

        size = 0
        for register in self.constants.values():
            take(register)
        for place, each in enumerate(instructions):
            if each.code is not Opcode.STORE:
                take(each.to.index)
            size = max([size, *(end for _, end, _ in taken)])
            taken = [entry for entry in taken if last_use[entry[2]] > place]
        return tuple(max(place, 0) for place in places), max(size, num_lanes)


class _Fusing:
    """A node being fused into a kernel."""

    def __init__(self, kernel: FusedNode, node: Node) -> None:
        self.kernel, self.node = kernel, node
        self.output = node.outputs[0]
        *outer, last = self.output.sizes
        if self.output.dtype not in DTYPES or not last.is_fixed or not 0 < last.fixed <= MAX_ROW:
            raise CannotFuseError
        if last.fixed > 1 and self.output.strides[-1] != ONE:
            raise CannotFuseError
        _product((*kernel.space, last))  # its elements in memory
        self.length = last.fixed
        self.dims = [dim for dim, size in enumerate(outer) if size != ONE]
        self.place_of = self._places()

    def run(self) -> None:
        """Add its instructions."""
        register = _EMITTERS[self.node.name](self)
        strides = [Size(0)] * len(self.kernel.space)
        for dim, place in self.place_of.items():
            strides[place] = self.output.strides[dim]
        self.kernel.held[self.output.value] = Held(register, self.output.dtype, self.length, tuple(strides))

    @property
    def rounds(self) -> bool:
        """Whether results are rounded to bfloat16."""
        return self.output.dtype == torch.bfloat16

    def emit(self, code: Opcode, length: int, a: Operand, b: Operand = UNUSED) -> int:
        """Add an instruction; returns the register of its result."""
        is_single = code is Opcode.SUM
        to = self.kernel.new_register(1 if is_single else length)
        self.kernel.instructions.append(Instruction(code, length, Operand(to, is_single=is_single), a, b, self.rounds))
        return to

    def operand(self, argument: Any) -> Operand:
        """A tensor or a number of the node."""
        if isinstance(argument, Size) and argument.is_fixed:
            return self.kernel.constant(float(argument.fixed))
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            return self.kernel.constant(float(argument))
        if not isinstance(argument, View) or argument.is_opaque:
            raise CannotFuseError
        length = self._length_of(argument)
        held = self.kernel.held.get(argument.value)
        if held is not None:
            offset, _ = self._part_of(argument, held)
            return Operand(held.register, offset, is_single=length == 1)
        strides = [Size(0)] * len(self.kernel.space)
        for dim, stride in self._outer(argument):
            strides[self.place_of[dim]] = stride
        if argument.dtype not in DTYPES:
            raise CannotFuseError
        rows = Rows(argument.value, argument.dtype, argument.offset, tuple(strides))
        return Operand(self.kernel.load(rows, length), is_single=length == 1)

    def _places(self) -> dict[int, int]:
        """For each dimension of the output but the last, its place in the space; those of size 1 have none."""
        places: dict[int, int] = {}
        for view in self.node.inputs:
            held = self.kernel.held.get(view.value)
            if held is None:
                continue
            for dim, place in self._part_of(view, held)[1].items():
                if places.setdefault(dim, place) != place:
                    raise CannotFuseError
        left = [dim for dim in self.dims if dim not in places]
        free = [place for place in range(len(self.kernel.space)) if place not in places.values()]
        if len(left) != len(free) or len(set(places.values())) != len(places):
            raise CannotFuseError
        for dim, place in zip(left, free, strict=True):
            if self.output.sizes[dim] != self.kernel.space[place]:
                raise CannotFuseError
            places[dim] = place
        return places

    def _part_of(self, view: View, held: Held) -> tuple[int, dict[int, int]]:
        """The offset in its register of a view of a value, and the places of its dimensions."""
        if view.dtype != held.dtype or not view.offset.is_fixed:
            raise CannotFuseError
        length = self._length_of(view)
        if view.offset.fixed + length > held.length:
            raise CannotFuseError
        places = {}
        for dim, stride in self._outer(view):
            size = self.output.sizes[dim]
            pairs = zip(held.strides, self.kernel.space, strict=True)
            found = [place for place, pair in enumerate(pairs) if pair == (stride, size)]
            if len(found) != 1:
                raise CannotFuseError
            places[dim] = found[0]
        if len(places) != len(self.kernel.space):  # one row, broadcast
            raise CannotFuseError
        return view.offset.fixed, places

    def _length_of(self, view: View) -> int:
        """Elements of a row of an input."""
        if not view.sizes:
            return 1
        last = view.sizes[-1]
        if not last.is_fixed or (last != ONE and view.strides[-1] != ONE):
            raise CannotFuseError
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
                raise CannotFuseError
            outer.append((dim, stride))
        return outer


_Emitter: TypeAlias = Callable[[_Fusing], int]


def _elementwise(fusing: _Fusing) -> int:
    code = ELEMENTWISE[fusing.node.name]
    operands, others = fusing.node.arguments[: code.num_operands], fusing.node.arguments[code.num_operands :]
    if others and others[0] not in (1, ONE):  # a factor of the second operand
        raise CannotFuseError
    return fusing.emit(code, fusing.length, *map(fusing.operand, operands))


def _square(fusing: _Fusing) -> int:
    base, exponent = fusing.node.arguments
    if exponent not in (2, 2.0, Size(2)):
        raise CannotFuseError
    return fusing.emit(Opcode.SQUARE, fusing.length, fusing.operand(base))


def _cast(fusing: _Fusing) -> int:
    operand = fusing.operand(fusing.node.arguments[0])
    if not fusing.rounds and operand.offset == 0:
        return operand.index  # registers are float32
    return fusing.emit(Opcode.COPY, fusing.length, operand)


def _activate(fusing: _Fusing) -> int:
    x, *activation = fusing.node.arguments
    code = ACTIVATIONS.get(tuple(activation))
    if code is None:
        raise CannotFuseError
    return fusing.emit(code, fusing.length, fusing.operand(x))


def _mean(fusing: _Fusing) -> int:
    """A sum of rows, or their mean."""
    view, dims, keeps_dim, dtype = fusing.node.arguments
    is_last = dims in ((Size(-1),), (Size(len(view.sizes) - 1),))
    length = view.sizes[-1].fixed
    is_plain = dtype in (None, torch.float32) and view.dtype == torch.float32
    if not (is_last and keeps_dim and is_plain and view.sizes[-1].is_fixed and MIN_SUM <= length <= MAX_ROW):
        raise CannotFuseError
    total = fusing.emit(Opcode.SUM, length, fusing.operand(view))
    if fusing.node.name == SUM:
        return total
    divisor = fusing.kernel.constant(float(length))
    return fusing.emit(Opcode.DIVIDE, 1, Operand(total, is_single=True), divisor)


def _concatenate(fusing: _Fusing) -> int:
    parts, dim = fusing.node.arguments
    if dim not in (Size(-1), Size(len(fusing.output.sizes) - 1)):
        raise CannotFuseError
    parts = [part for part in parts if part.sizes[-1] != Size(0)]
    operands = [fusing.operand(part) for part in parts]
    to, offset = fusing.kernel.new_register(fusing.length), 0
    for part, operand in zip(parts, operands, strict=True):
        length = part.sizes[-1].fixed
        source = Operand(operand.index, operand.offset)
        fusing.kernel.instructions.append(Instruction(Opcode.COPY, length, Operand(to, offset), source))
        offset += length
    return to


_EMITTERS: dict[Any, _Emitter] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("aten::to.dtype", "aten::_to_copy"), _cast),
    "aten::pow.Tensor_Scalar": _square,
    "aten::mean.dim": _mean,
    SUM: _mean,
    "aten::cat": _concatenate,
    "inflight::activate": _activate,
}


def _product(sizes: Sequence[Size]) -> Size:
    """A product in which at most one factor grows. Raises `CannotFuseError` if several do."""
    product = ONE
    for size in sizes:
        if not product.is_fixed and not size.is_fixed:
            raise CannotFuseError
        fixed, growing = (product.fixed, size) if product.is_fixed else (size.fixed, product)
        product = Size(fixed * growing.fixed, fixed * growing.per_token, fixed * growing.per_logit_row)
    return product


Work: TypeAlias = Node | FusedNode


def fuse(graph: Graph) -> tuple[list[Work], list[list[int]]]:
    """The nodes of a graph, some of them fused, and the values that each writes to memory.

    A node joins the first kernel after its inputs that can take it, or starts one. So it may run earlier than in the
    model, never later. No node moves across an operator that mutates its arguments."""
    work: list[Work] = []
    made_by: dict[int, int] = {}
    read_by: dict[int, set[int]] = {}
    first = 0  # earlier kernels are closed
    for node in graph.nodes:
        makers = [made_by[view.value] for view in node.inputs if view.value in made_by]
        place = _fused_into(node, work, max([first, *makers]))
        if place is None:
            place = len(work)
            work.append(node)
            if node.mutates:
                first = len(work)
        made_by |= {view.value: place for view in node.outputs if view.value not in made_by}
        for view in node.inputs:
            read_by.setdefault(view.value, set()).add(place)
    for view in graph.outputs:
        read_by.setdefault(view.value, set()).add(len(work))
    stored: list[list[int]] = [[] for _ in work]
    for value, place in made_by.items():
        if isinstance(work[place], FusedNode) and read_by.get(value, set()) - {place}:
            stored[place].append(value)
    return work, stored


def _fused_into(node: Node, work: list[Work], first: int) -> int | None:
    """The index of a node's kernel; None: it is not fused."""
    is_fusible = node.name in _EMITTERS and len(node.outputs) == 1 and len(node.outputs[0].sizes) > 0
    if node.mutates or not is_fusible:
        return None
    for place, kernel in enumerate(work[first:], first):
        if isinstance(kernel, FusedNode) and kernel.fuse(node):
            return place
    kernel = FusedNode(tuple(size for size in node.outputs[0].sizes[:-1] if size != ONE))
    if not kernel.fuse(node):
        return None
    work.append(kernel)
    return len(work) - 1


def last_uses(work: Sequence[Work], graph: Graph) -> list[list[int]]:
    """For each work item, the values last read there."""
    released: list[list[int]] = [[] for _ in work]
    seen = {*(view.value for view in graph.outputs), *graph.constants}
    for place in range(len(work) - 1, -1, -1):
        for value in _values(work[place]) - seen:
            released[place].append(value)
            seen.add(value)
    return released


def _values(work: Work) -> set[int]:
    """All its inputs and outputs."""
    if isinstance(work, Node):
        return {view.value for view in (*work.inputs, *work.outputs)}
    return {each.rows.value for each in work.instructions if each.rows is not None} | set(work.held)
