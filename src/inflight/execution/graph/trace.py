"""Traces a forward pass into a graph.

The model runs three times: with data at two small sizes, and without data at the largest step. Every size, stride and
integer must be the same linear function of T and R in all three, and everything else equal. So models that branch on
the length or on values, or keep state, are not traced.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.execution.graph.graph import Graph, Node, simplified
from inflight.execution.graph.program import NUM_INPUTS, ONE, Size, View

logger = logging.getLogger(__name__)

SAMPLES = ((6, 2), (11, 5))
"""Tokens T and rows of logits R of the traces with data."""
LEAST_LONG, LONG_LOGIT_ROWS = 64, 7
"""The fewest tokens of the trace without data, and its rows of logits."""
UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
"""Tags of operators whose results, or whose shapes, depend on more than the shapes of their arguments."""


MAY_COPY = (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default)
"""Operators that copy a tensor, or not, as its strides require."""


class UntraceableError(Exception):
    """A forward pass cannot be traced. The message is the reason, in words after "because"."""


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor as a view of its memory.

    Attributes:
        memory: the number of its storage, in order of appearance.
        strides: None for a oneDNN tensor, whose memory is opaque.
        offset: of its first element, in elements.
    """

    memory: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of an operator.

    Attributes:
        arguments: in the order of its schema, each tensor as a `TracedTensor`.
    """

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: tuple[TracedTensor, ...]


def memory_of(tensor: torch.Tensor) -> int:
    """The id of the storage of a tensor `[…]` of any dtype, valid while a tensor of it is alive."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces the operators that run in its context.

    Args:
        inputs: the forward pass's input tensors, `[T]`, `[T]` or `[k, T]`, and `[R]` int64, with the first numbers.

    Attributes:
        tensors: one tensor `[…]` of each memory, which keeps it alive.
        outputs: what the forward pass returned, set at its end.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TracedCall] = []
        self.tensors: list[torch.Tensor] = []
        self.outputs: tuple[TracedTensor, ...] = ()
        self._numbers: dict[int, int] = {}
        for tensor in inputs:
            self.traced(tensor)

    def traced(self, argument: Any) -> Any:
        """An argument, with tensors as `TracedTensor`s and lists as tuples."""
        if isinstance(argument, list | tuple):
            return tuple(map(self.traced, argument))
        if not isinstance(argument, torch.Tensor):
            return argument
        number = self._numbers.setdefault(memory_of(argument), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(argument)
        sizes = tuple(argument.shape)
        if argument.is_mkldnn:
            return TracedTensor(number, argument.dtype, sizes, None, 0)
        return TracedTensor(number, argument.dtype, sizes, tuple(argument.stride()), int(argument.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and trace it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor without data for its device
            return func(*args, **kwargs)
        defaults, may_be_unrepeatable = _declared(func)
        given = [*args, *(kwargs.get(name, default) for name, default in defaults[len(args) :])]
        if func == torch.ops.aten.dropout.default and given[2] is False:
            return given[0]  # in evaluation; without data it would be a copy
        if may_be_unrepeatable and not _is_repeatable(func, given):
            raise UntraceableError(f"it depends on the values of tensors ({func})")
        arguments = tuple(map(self.traced, given))  # before the operator writes into them
        result = _run(func, args, kwargs, given)
        if func in MAY_COPY and memory_of(result) != memory_of(given[0]):
            with self:  # of one row they would be views, at another place in memory
                return given[0].clone(memory_format=torch.contiguous_format).view(result.shape)
        results = () if result is None else result if isinstance(result, list | tuple) else (result,)
        if not all(isinstance(each, torch.Tensor) for each in results):
            raise UntraceableError(f"it depends on the values of tensors ({func})")
        self.calls.append(TracedCall(func, arguments, self.traced(results)))
        return result


def trace_forward(forward: Callable[..., Sequence[torch.Tensor]], max_tokens: int, num_dimensions: int = 1) -> Graph:
    """Trace a forward pass, running its model a few times on arbitrary tokens.

    Args:
        forward: takes token ids `[T]`, positions `[T]`, or `[k, T]` in k dimensions, and logit rows `[R]`, all int64;
            T and R are at least 1.
        max_tokens: the most tokens of a step.
        num_dimensions: of positions.

    Raises:
        UntraceableError: the operators vary between steps.
    """
    tracers = [_trace(forward, *sample, num_dimensions) for sample in SAMPLES]
    longest = max(max_tokens, LEAST_LONG), LONG_LOGIT_ROWS
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            long_tracer = _trace(forward, *longest, num_dimensions)
        except UntraceableError:
            raise
        except Exception as error:
            logger.debug("a forward pass without data failed", exc_info=True)
            raise UntraceableError(f"it cannot run without data ({type(error).__name__})") from error
    return _as_graph(tracers, long_tracer, longest)


def _trace(
    forward: Callable[..., Sequence[torch.Tensor]], num_tokens: int, num_logit_rows: int, num_dimensions: int
) -> Tracer:
    """Trace a forward pass (see `trace_forward`) over T arbitrary tokens with R logit rows."""
    positions = torch.arange(num_tokens)
    positions = positions if num_dimensions == 1 else positions.repeat(num_dimensions, 1)
    inputs = torch.zeros(num_tokens, dtype=torch.int64), positions, torch.arange(num_logit_rows)
    tracer = Tracer(inputs)
    with tracer:
        outputs = forward(*inputs)
    tracer.outputs = tracer.traced(outputs)
    return tracer


@functools.cache
def _declared(operator: torch._ops.OpOverload) -> tuple[list[tuple[str, Any]], bool]:
    """The names and defaults of an operator's arguments, and whether it has an `UNREPEATABLE` tag."""
    defaults = [(argument.name, argument.default_value) for argument in operator._schema.arguments]
    return defaults, any(tag in operator.tags for tag in UNREPEATABLE)


def _run(operator: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Any]) -> Any:
    """Run an operator. Even without data, results of weights alone are computed: a model may use tensor subclasses
    there. The size of `bincount` is known if it gets the number of bins."""
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
        with unset_fake_temporarily():
            return operator(*args, **kwargs)
    if operator == torch.ops.aten.bincount.default and isinstance(given[0], FakeTensor):
        return given[0].new_empty(given[2])
    return operator(*args, **kwargs)


def _is_repeatable(operator: torch._ops.OpOverload, given: Sequence[Any]) -> bool:
    """Whether a call of an operator with an `UNREPEATABLE` tag is still repeatable: indexing by integers (with a mask,
    the result's size depends on values); `bincount` with a given number of bins, as for routed experts."""
    if operator == torch.ops.aten.bincount.default:
        return bool(given[2] > 0)
    if operator in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return all(index is None or index.dtype in (torch.int64, torch.int32) for index in given[1])
    return False


def _as_graph(tracers: Sequence[Tracer], long_tracer: Tracer, longest: tuple[int, int]) -> Graph:
    """The graph of these traces: with the `SAMPLES`, in this order, and with `longest` tokens and logit rows."""
    first, all_tracers = tracers[0], (*tracers, long_tracer)
    operators = [call.operator for call in first.calls]
    if any([call.operator for call in tracer.calls] != operators for tracer in all_tracers):
        raise UntraceableError("it calls other operators for other lengths")
    merge = _Merger(longest)
    nodes = [
        Node(calls[0].operator, merge(tuple(c.arguments for c in calls)), merge(tuple(c.outputs for c in calls)))
        for calls in zip(*(tracer.calls for tracer in all_tracers), strict=True)
    ]
    outputs = merge(tuple(tracer.outputs for tracer in all_tracers))
    made: set[int] = set()
    read: set[int] = set()  # before any node wrote them
    for node in nodes:
        read |= {view.value for view in node.inputs} - made
        made |= {view.value for view in node.outputs} - read
    constants = {
        number: _same_constant([tracer.tensors[number] for tracer in tracers])
        for number in range(NUM_INPUTS, len(first.tensors))
        if number not in made
    }
    for node in nodes:
        if any(view.value in constants or view.value < NUM_INPUTS for view in node.written):
            raise UntraceableError(f"it mutates its state ({node.name})")
    return simplified(Graph(nodes, constants, outputs), first.tensors)


def _same_constant(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor `[…]` that existed before the forward pass, in each trace. Raises `UntraceableError` if they differ."""
    first, *others = tensors
    for other in others:
        if memory_of(other) != memory_of(first) and (first.is_mkldnn or not torch.equal(first, other)):
            raise UntraceableError("it makes a tensor that depends on the length without torch's operators")
    return first


class _Merger:
    """Merges an argument's values over the traces."""

    def __init__(self, longest: tuple[int, int]) -> None:
        self._longest = longest
        self._sizes: dict[tuple[int, ...], Size] = {}
        self._of_longest: dict[int, int] = {}
        """The sample's memory for each memory of the longest trace, which may have more: without data, a view of a
        constant has its own memory."""

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """The merged argument. Raises `UntraceableError` if it depends on the length other than as a `Size`."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise UntraceableError("an argument changes its type with the length")
        if isinstance(first, TracedTensor):
            *others, longest = values
            same_memory = self._of_longest.setdefault(longest.memory, first.memory) == first.memory
            same_memory &= all(each.memory == first.memory for each in others)
            if not same_memory or any((v.dtype, len(v.sizes)) != (first.dtype, len(first.sizes)) for v in values):
                raise UntraceableError("it takes other tensors for other lengths")
            sizes = self(tuple(each.sizes for each in values))
            strides = self._strides(sizes, tuple(each.strides for each in values))
            offset, is_opaque = self(tuple(each.offset for each in values)), strides is None
            return View(first.memory, first.dtype, sizes, strides or (), offset, is_opaque)
        if isinstance(first, tuple):
            if any(len(value) != len(first) for value in values):
                raise UntraceableError("a list of arguments changes its length")
            return tuple(map(self, zip(*values, strict=True)))
        if isinstance(first, int) and not isinstance(first, bool):
            if values not in self._sizes:
                self._sizes[values] = self._size(values)
            return self._sizes[values]
        if any(value != first for value in values):
            raise UntraceableError("an argument depends on the length")
        return first

    def _strides(self, sizes: tuple[Size, ...], strides: tuple[Any, ...]) -> Any:
        """A tensor's strides, or None. Strides of one-element dimensions are normalised: they are never read, and
        torch's differ without data."""
        if None in strides:
            return self(strides)
        of_dimensions = zip(sizes, zip(*strides, strict=True), strict=True)
        return tuple(Size(each[0]) if size == ONE else self(each) for size, each in of_dimensions)

    def _size(self, numbers: tuple[int, ...]) -> Size:
        """A number in each trace."""
        (tokens, rows), (more_tokens, more_rows), (most_tokens, most_rows) = *SAMPLES, self._longest
        more, most = numbers[1] - numbers[0], numbers[2] - numbers[0]
        # more = per_token * by_tokens + per_row * by_rows, and likewise most
        by_tokens, by_rows = more_tokens - tokens, more_rows - rows
        per_token = (most * by_rows - more * (most_rows - rows)) // (
            (most_tokens - tokens) * by_rows - by_tokens * (most_rows - rows)
        )
        per_row = (more - per_token * by_tokens) // by_rows
        size = Size(numbers[0] - per_token * tokens - per_row * rows, per_token, per_row)
        if tuple(size.at(*each) for each in (*SAMPLES, self._longest)) != numbers:
            raise UntraceableError("a size does not grow evenly with the length")
        return size
