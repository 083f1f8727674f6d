"""A program in the form in which `kernels/program.cpp` reads it: numbers and words, in order."""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from inflight.execution.graph.fuse import Work, fused, last_uses
from inflight.execution.graph.graph import NUM_INPUTS, Call, RecordedPass, Size, View
from inflight.execution.graph.row_kernel import Instruction, Opcode, Operand, RowKernel, Rows
from inflight.execution.graph.trace import UnrecordableError

MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}


class Kind(IntEnum):
    """Of an argument, as in `kernels/program.cpp`."""

    NONE = 0
    INTEGER = 1
    NUMBER = 2
    FLAG = 3
    TENSOR = 4
    INTEGERS = 5
    TENSORS = 6
    NUMBER_AS_TENSOR = 7
    INTEGER_AS_TENSOR = 8
    WORD = 9
    DEVICE = 10
    NUMBERS = 11


class Piece(IntEnum):
    """What a piece of work is, as in `kernels/program.cpp`."""

    ROW_KERNEL = 0
    OPERATOR = 1
    LINEAR = 2


HANDLES = ("linear", "call", "experts", "step", "exchange")
"""Arguments of our operators that are numbers by which the kernels know an object of this process."""
MULTIPLYING = ("mm", "matmul", "linear", "conv", "dot_product")
"""Parts of the names of torch's operators that are work for several threads."""


class Program(NamedTuple):
    """A forward pass as the kernels read it.

    Attributes:
        codes, numbers, words, constants: what the operator `new_program` takes: codes, the numbers and words that they
            name, and the tensors that are there before the pass begins.
        handles: the kinds of the handles (`HANDLES`) among the codes, by their places.
        needs_torch_threads: whether torch's operators have work for several threads.
    """

    codes: list[int]
    numbers: list[float]
    words: list[str]
    constants: list[torch.Tensor]
    handles: dict[int, str]
    needs_torch_threads: bool


def encoded(recorded: RecordedPass, *, fuses: bool = True) -> Program:
    """The program of a recorded pass.

    Args:
        fuses: whether small operators run as row kernels.
    """
    if fuses:
        work, stored = fused(recorded)
    else:
        work, stored = list(recorded.calls), [[] for _ in recorded.calls]
    writer = _Writer()
    writer.program(recorded, work, stored)
    names = [call.name for call in recorded.calls if call.name.startswith("aten::")]
    needs_torch_threads = any(part in name for name in names for part in MULTIPLYING)
    constants = list(recorded.constants.values())
    return Program(writer.codes, writer.numbers, writer.words, constants, writer.handles, needs_torch_threads)


class _Writer:
    def __init__(self) -> None:
        self.codes: list[int] = []
        self.numbers: list[float] = []
        self.words: list[str] = []
        self.handles: dict[int, str] = {}

    def program(self, recorded: RecordedPass, work: Sequence[Work], stored: Sequence[list[int]]) -> None:
        values = {view.value for call in recorded.calls for view in (*call.inputs, *call.outputs)}
        values |= {view.value for view in recorded.outputs}
        self.codes.append(1 + max({*values, *recorded.constants, NUM_INPUTS - 1}))
        self._list(self.codes.append, recorded.constants)
        self.codes.append(len(work))
        for piece, to_store, released in zip(work, stored, last_uses(work, recorded), strict=True):
            if not isinstance(piece, Call):
                self.codes.append(Piece.ROW_KERNEL)
                self._kernel(piece, to_store)
            elif piece.name == "inflight::linear":
                self.codes.append(Piece.LINEAR)
                self._linear(piece)
            else:
                self.codes.append(Piece.OPERATOR)
                self._call(piece)
            self._list(self.codes.append, released)
        self._list(self._view, recorded.outputs)

    def _call(self, call: Call) -> None:
        schema = call.operator._schema
        self._word(schema.name)
        self._word(schema.overload_name)
        self.codes.append(len(call.arguments))
        for argument, given in zip(schema.arguments, call.arguments, strict=True):
            if call.operator.namespace == "inflight" and argument.name in HANDLES:
                self.handles[len(self.codes) + 1] = argument.name  # after its kind
            self._argument(given, is_tensor="Tensor" in str(argument.type))
        self._list(self.codes.append, [view.value for view in call.outputs])

    def _linear(self, call: Call) -> None:
        rows, number, _ = call.arguments
        self.handles[len(self.codes)] = "linear"
        self.codes.append(number.fixed)
        self._view(rows)
        self.codes.append(call.outputs[0].value)

    def _argument(self, given: Any, *, is_tensor: bool) -> None:
        if given is None:
            self.codes.append(Kind.NONE)
        elif isinstance(given, View):
            self.codes.append(Kind.TENSOR)
            self._view(given)
        elif isinstance(given, Size) and is_tensor and given.is_fixed:
            self.codes += (Kind.INTEGER_AS_TENSOR, given.fixed)
        elif isinstance(given, Size):
            self.codes += (Kind.INTEGER, *given)
        elif isinstance(given, bool):
            self.codes += (Kind.FLAG, given)
        elif isinstance(given, float):
            self.codes.append(Kind.NUMBER_AS_TENSOR if is_tensor else Kind.NUMBER)
            self._number(given)
        elif isinstance(given, torch.dtype):
            self.codes += (Kind.INTEGER, *Size(_scalar_type(given)))
        elif isinstance(given, torch.memory_format) and given in MEMORY_FORMATS:
            self.codes += (Kind.INTEGER, *Size(MEMORY_FORMATS[given]))
        elif isinstance(given, torch.layout) and given is torch.strided:
            self.codes += (Kind.INTEGER, *Size(0))
        elif isinstance(given, str):
            self.codes.append(Kind.WORD)
            self._word(given)
        elif isinstance(given, torch.device):
            self.codes.append(Kind.DEVICE)
            self._word(str(given))
        elif isinstance(given, tuple) and is_tensor and all(each is None or isinstance(each, View) for each in given):
            self.codes.append(Kind.TENSORS)
            self._list(self._optional_view, given)
        elif isinstance(given, tuple) and all(isinstance(each, Size) for each in given):
            self.codes.append(Kind.INTEGERS)
            self._sizes(given)
        elif isinstance(given, tuple) and all(isinstance(each, float) for each in given):
            self.codes.append(Kind.NUMBERS)
            self._list(self._number, given)
        else:
            raise UnrecordableError(f"an operator takes {given!r}")

    def _optional_view(self, view: View | None) -> None:
        self.codes.append(view is not None)
        if view is not None:
            self._view(view)

    def _kernel(self, kernel: RowKernel, to_store: Sequence[int]) -> None:
        instructions = _with_stores(kernel, to_store)
        places, num_floats = _places(kernel, instructions)
        self._sizes(kernel.space)
        self._list(self.codes.append, places)
        self.codes.append(num_floats)
        self.codes.append(len(kernel.constants))
        for number, register in kernel.constants.items():
            self.codes.append(register)
            self._number(number)
        self.codes.append(len(to_store))
        for value in to_store:
            self.codes += (value, _scalar_type(kernel.held[value].dtype), *kernel.numel(value))
        self._list(self._instruction, instructions)

    def _instruction(self, each: Instruction) -> None:
        self.codes += (each.code, each.length, each.rounds)
        for operand in (each.to, each.a, each.b):
            self._operand(operand)
        if each.rows is not None:
            self._rows(each.rows)
        elif each.code is Opcode.ACTIVATE:
            for word in each.activation:
                self._word(word)

    def _operand(self, operand: Operand) -> None:
        self.codes += (operand.register, operand.offset, operand.is_single)

    def _rows(self, rows: Rows) -> None:
        self.codes += (rows.value, _scalar_type(rows.dtype), *rows.offset)
        self._sizes(rows.strides)

    def _view(self, view: View) -> None:
        self.codes += (view.value, view.is_opaque, _scalar_type(view.dtype))
        self._sizes(view.sizes)
        self._sizes(view.strides)
        self.codes += view.offset

    def _sizes(self, sizes: Sequence[Size]) -> None:
        self._list(self.codes.extend, sizes)

    def _list(self, write: Callable[[Any], None], values: Iterable[Any]) -> None:
        values = list(values)
        self.codes.append(len(values))
        for value in values:
            write(value)

    def _number(self, number: float) -> None:
        self.codes.append(len(self.numbers))
        self.numbers.append(number)

    def _word(self, word: str) -> None:
        self.codes.append(len(self.words))
        self.words.append(word)


def _with_stores(kernel: RowKernel, to_store: Sequence[int]) -> list[Instruction]:
    """A kernel's instructions; what is stored is stored as soon as it is there."""
    instructions = list(kernel.instructions)
    for store in kernel.stores(to_store):
        makers = [place for place, each in enumerate(instructions) if each.makes(store.a.register)]
        instructions.insert(makers[-1] + 1, store)
    return instructions


def _places(kernel: RowKernel, instructions: Sequence[Instruction]) -> tuple[list[int], int]:
    """Where each register begins among the floats of all, and how many floats that is. Registers that are not needed
    at the same time share memory."""
    num_lanes: int = torch.ops.inflight.num_lanes()
    last_use: dict[int, int] = {}
    for place, each in enumerate(instructions):
        for operand in (each.to, each.a, each.b):
            last_use[operand.register] = place
    for register in kernel.constants.values():
        last_use[register] = len(instructions)
    places = [-1] * len(kernel.lengths)
    taken: list[tuple[int, int, int]] = []  # from, to, register

    def take(register: int) -> None:
        if places[register] >= 0:
            return
        length = -(-kernel.lengths[register] // num_lanes) * num_lanes + num_lanes
        start = 0
        for begin, end, _ in sorted(taken):
            if begin - start >= length:
                break
            start = max(start, end)
        places[register] = start
        taken.append((start, start + length, register))

    size = 0
    for register in kernel.constants.values():
        take(register)
    for place, each in enumerate(instructions):
        if each.code is not Opcode.STORE:
            take(each.to.register)
        size = max([size, *(end for _, end, _ in taken)])
        taken = [entry for entry in taken if last_use[entry[2]] > place]
    return [max(place, 0) for place in places], max(size, num_lanes)


def _scalar_type(dtype: torch.dtype) -> int:
    number: int = torch.ops.inflight.scalar_type(dtype)
    return number
