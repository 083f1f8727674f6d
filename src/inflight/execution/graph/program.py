"""The format of a program, which `encode.py` writes and `kernels/program.cpp` runs.

A dataclass here is a layout: its fields, in order. `tools/program_header.py` generates the opcodes and layouts of C++,
`kernels/program_format.h`, from this file.
"""

from dataclasses import dataclass, is_dataclass
from enum import IntEnum
from typing import get_type_hints

import torch


class ValueKind(IntEnum):
    """The type of an operator's argument. The last two are not used in programs, only between kernels and torch."""

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
    WORDS = 12
    OPTIONAL_TENSORS = 13


class Opcode(IntEnum):
    """An instruction of a row kernel: its code, and how many registers it reads."""

    num_operands: int

    LOAD = 0, 0
    STORE = 1, 1
    COPY = 2, 1
    ADD = 3, 2
    SUBTRACT = 4, 2
    MULTIPLY = 5, 2
    DIVIDE = 6, 2
    NEGATE = 7, 1
    SQUARE = 8, 1
    SQUARE_ROOT = 9, 1
    RECIPROCAL_ROOT = 10, 1
    SUM = 11, 1
    RELU = 12, 1
    SWISH = 13, 1
    GELU = 14, 1
    GELU_TANH = 15, 1

    def __new__(cls, code: int, num_operands: int) -> "Opcode":
        made = int.__new__(cls, code)
        made._value_, made.num_operands = code, num_operands
        return made


@dataclass(frozen=True, slots=True)
class Size:
    """A number that grows with a step: `fixed + per_token * T + per_logit_row * R`."""

    fixed: int
    per_token: int = 0
    per_logit_row: int = 0

    def at(self, num_tokens: int, num_logit_rows: int) -> int:
        """The number for one step."""
        return self.fixed + self.per_token * num_tokens + self.per_logit_row * num_logit_rows

    @property
    def is_fixed(self) -> bool:
        """Whether it is constant."""
        return self.per_token == self.per_logit_row == 0


ONE = Size(1)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of the memory of a value. `offset` and strides are in elements.

    Attributes:
        is_opaque: a oneDNN tensor, which is no view of memory and has no strides.
    """

    value: int
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    is_opaque: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """An operator's argument: its kind and value. Integers and flags are sizes."""

    kind: ValueKind
    sizes: tuple[Size, ...] = ()
    numbers: tuple[float, ...] = ()
    views: tuple[View | None, ...] = ()
    word: str = ""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of one of torch's or our operators. `outputs` are values."""

    name: str
    overload: str
    arguments: tuple[Argument, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearCall:
    """A call of a linear layer of ours, by its handle, without the dispatcher. `output` is a value."""

    linear: int
    input: View
    output: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A register from an offset on, or one number for a whole row."""

    index: int
    offset: int = 0
    is_single: bool = False


UNUSED = Operand(-1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory, float32 or bfloat16: where each row of a kernel's space begins, in elements."""

    value: int
    dtype: torch.dtype
    offset: Size
    strides: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction on `length` elements of a row.

    Attributes:
        rounds: whether the result is rounded to bfloat16.
        rows: of LOAD and STORE.
    """

    code: Opcode
    length: int
    to: Operand = UNUSED
    a: Operand = UNUSED
    b: Operand = UNUSED
    rounds: bool = False
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in a register."""

    index: int
    number: float


@dataclass(frozen=True, slots=True)
class Output:
    """A value that a row kernel writes to memory, of `numel` elements."""

    value: int
    dtype: torch.dtype
    numel: Size


@dataclass(frozen=True, slots=True)
class RowKernel:
    """Instructions that run for each row of a space.

    Attributes:
        space: rows in each dimension.
        registers: where each begins, among `num_floats` float32.
    """

    space: tuple[Size, ...]
    registers: tuple[int, ...]
    num_floats: int
    constants: tuple[Constant, ...]
    outputs: tuple[Output, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A work item, and the values released after it."""

    work: OperatorCall | RowKernel | LinearCall
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A forward pass. Values are numbered: token ids, positions and logit rows first; `constants` are values, too."""

    num_values: int
    constants: tuple[int, ...]
    items: tuple[Item, ...]
    outputs: tuple[View, ...]


NUM_INPUTS = 3
"""Token ids, positions and logit rows: the first values of a program."""
FIELDS = {each: get_type_hints(each) for each in [*globals().values()] if isinstance(each, type) and is_dataclass(each)}
"""The names and types of each layout's fields."""
