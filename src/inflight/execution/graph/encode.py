"""Encodes a graph as a program: codes, numbers and words, in the layouts of `program.py`.

`CompiledGraph`: runs a program, and so a model's forward pass without Python.

Operators run in the model's order, with the same arguments and kernels, except that small ones are fused into row
kernels. The results have the same bits, as `preparation/graph_proof.py` checks. LongRoPE, models with hooks, experts in
a model's own code, other devices and backends, and untraceable models are not compiled.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import torch

from inflight.execution.graph.fuse import FusedNode, Work, fuse, last_uses
from inflight.execution.graph.graph import Graph
from inflight.execution.graph.program import (
    FIELDS,
    NUM_INPUTS,
    Argument,
    Item,
    LinearCall,
    OperatorCall,
    Program,
    RowKernel,
    Size,
    ValueKind,
    View,
)
from inflight.execution.graph.trace import UntraceableError
from inflight.execution.kernels import delete_with

MAX_SHORT, ITEMS_AT_ONCE = 64, 4
"""A step of at most `MAX_SHORT` tokens runs in one call. A longer one, which may take seconds, runs `ITEMS_AT_ONCE`
items per call."""


ENUMERATORS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.strided: 0}
"""Torch's numbers of memory formats and layouts."""
HANDLES = ("linear", "call", "experts", "step", "exchange", "mixer", "placing")
"""Arguments of our operators that are handles."""
MULTIPLYING = ("mm", "matmul", "linear", "conv", "dot_product")
"""Substrings of torch's operator names that are worth several threads."""


class Handle(int):
    """A code that is a handle, of a `kind` in `HANDLES`."""

    kind: str

    def __new__(cls, number: int, kind: str) -> "Handle":
        made = super().__new__(cls, number)
        made.kind = kind
        return made


class EncodedProgram(NamedTuple):
    """A program in the kernels' format.

    Attributes:
        codes, numbers, words, constants: arguments of the operator `new_program`: codes, the numbers and words that
            they refer to, and the constant tensors `[…]`, of any dtype.
        handles: the kinds of the handles (`HANDLES`) among the codes, by their places.
        needs_torch_threads: whether torch's operators need several threads.
    """

    codes: list[int]
    numbers: list[float]
    words: list[str]
    constants: list[torch.Tensor]
    handles: dict[int, str]
    needs_torch_threads: bool


def encode(graph: Graph, *, fuses: bool = True) -> EncodedProgram:
    """Encode a graph for `CompiledGraph`. Raises `UntraceableError` for unsupported arguments of an operator.

    Args:
        fuses: whether small operators are fused into row kernels.
    """
    names = [node.name for node in graph.nodes if node.name.startswith("aten::")]
    multiplies = any(part in name for name in names for part in MULTIPLYING)
    encoded = EncodedProgram([], [], [], list(graph.constants.values()), {}, multiplies)
    _write(encoded, Program, lower(graph, fuses=fuses))
    return encoded


def _write(to: EncodedProgram, kind: Any, value: Any) -> None:
    """Append a value to a program.

    Args:
        kind: the type of the field that has it, as in `FIELDS`.
    """
    parts = get_args(kind)
    if kind in FIELDS:
        for name, declared in FIELDS[kind].items():
            _write(to, declared, getattr(value, name))
    elif get_origin(kind) is tuple:
        to.codes.append(len(value))
        for each in value:
            _write(to, parts[0], each)
    elif NoneType in parts:
        to.codes.append(value is not None)
        if value is not None:
            _write(to, parts[0], value)
    elif parts:  # a union
        to.codes.append(parts.index(type(value)))
        _write(to, type(value), value)
    elif kind is float:
        to.codes.append(len(to.numbers))
        to.numbers.append(value)
    elif kind is str:
        to.codes.append(len(to.words))
        to.words.append(value)
    else:
        if isinstance(value, Handle):
            to.handles[len(to.codes)] = value.kind
        to.codes.append(int(torch.ops.inflight.scalar_type(value) if kind is torch.dtype else value))


def lower(graph: Graph, *, fuses: bool = True) -> Program:
    """The program of a graph, as its layouts. Errors and arguments as in `encode`."""
    work, stored = fuse(graph) if fuses else ([*graph.nodes], [[] for _ in graph.nodes])
    views = [*graph.outputs, *(view for node in graph.nodes for view in (*node.inputs, *node.outputs))]
    num_values = 1 + max({*(view.value for view in views), *graph.constants, NUM_INPUTS - 1})
    items = tuple(
        Item(_lowered(each, to_store), tuple(released))
        for each, to_store, released in zip(work, stored, last_uses(work, graph), strict=True)
    )
    return Program(num_values, tuple(graph.constants), items, graph.outputs)


def _lowered(work: Work, to_store: Sequence[int]) -> OperatorCall | RowKernel | LinearCall:
    if isinstance(work, FusedNode):
        return work.row_kernel(to_store)
    if work.name == "inflight::linear":
        rows, number, _ = work.arguments
        return LinearCall(Handle(number.fixed, "linear"), rows, work.outputs[0].value)
    schema = work.operator._schema
    is_ours = work.operator.namespace == "inflight"
    arguments = (
        Argument(ValueKind.INTEGER, (Size(Handle(given.fixed, declared.name)),))
        if is_ours and declared.name in HANDLES
        else _argument(given, is_tensor="Tensor" in str(declared.type))
        for declared, given in zip(schema.arguments, work.arguments, strict=True)
    )
    outputs = tuple(view.value for view in work.outputs)
    return OperatorCall(schema.name, schema.overload_name, tuple(arguments), outputs)


def _argument(given: Any, *, is_tensor: bool) -> Argument:
    if given is None:
        return Argument(ValueKind.NONE)
    if isinstance(given, View):
        return Argument(ValueKind.TENSOR, views=(given,))
    if isinstance(given, Size):
        return Argument(ValueKind.INTEGER_AS_TENSOR if is_tensor and given.is_fixed else ValueKind.INTEGER, (given,))
    if isinstance(given, bool):
        return Argument(ValueKind.FLAG, (Size(given),))
    if isinstance(given, float):
        return Argument(ValueKind.NUMBER_AS_TENSOR if is_tensor else ValueKind.NUMBER, numbers=(given,))
    if isinstance(given, torch.dtype):
        return Argument(ValueKind.INTEGER, (Size(torch.ops.inflight.scalar_type(given)),))
    if isinstance(given, torch.memory_format | torch.layout) and given in ENUMERATORS:
        return Argument(ValueKind.INTEGER, (Size(ENUMERATORS[given]),))
    if isinstance(given, str | torch.device):
        return Argument(ValueKind.WORD if isinstance(given, str) else ValueKind.DEVICE, word=str(given))
    if isinstance(given, tuple) and is_tensor and all(each is None or isinstance(each, View) for each in given):
        return Argument(ValueKind.TENSORS, views=given)
    if isinstance(given, tuple) and all(isinstance(each, Size) for each in given):
        return Argument(ValueKind.INTEGERS, given)
    if isinstance(given, tuple) and all(isinstance(each, float) for each in given):
        return Argument(ValueKind.NUMBERS, numbers=given)
    raise UntraceableError(f"an operator takes {given!r}")


class CompiledGraph:
    """Takes token ids `[T]`, positions `[k T]` and logit rows `[R]`, all int64, to the outputs of the graph; T and R
    are at least 1, and positions have k dimensions.

    Attributes:
        program: the compiled program.
    """

    def __init__(self, program: EncodedProgram) -> None:
        self.program = program
        self._handle: int = torch.ops.inflight.new_program(*program[:4])
        delete_with(self, torch.ops.inflight.delete_program, self._handle)

    def __call__(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor]
        if len(rows[0]) <= MAX_SHORT:
            outputs = torch.ops.inflight.run_program(*rows, self._handle)
            return outputs
        run = torch.ops.inflight.new_program_run(*rows, self._handle)
        try:
            while torch.ops.inflight.advance_program_run(run, ITEMS_AT_ONCE):
                pass  # interrupts are handled here
            outputs = torch.ops.inflight.outputs_of_program_run(run)
        finally:
            torch.ops.inflight.delete_program_run(run)
        return outputs
