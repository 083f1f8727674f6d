"""A forward pass of any size, from recordings of a few sizes: what differs between them grows with the step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from inflight.execution.graph.trace import Recording, SeenTensor, UnrecordableError, memory_of

SAMPLES = ((6, 2), (11, 5))
"""Tokens T and rows of logits R of the recordings with data. Sizes are found from them and from a longer one."""
NUM_INPUTS = 3
"""Token ids, positions and logit rows: the first values of a program."""
MAX_FOLDED_BYTES = 2**20
"""What is computed from weights alone is kept, if it is no larger."""


class Size(NamedTuple):
    """A number that grows with a step: `fixed + per_token * T + per_logit_row * R`."""

    fixed: int
    per_token: int = 0
    per_logit_row: int = 0

    def at(self, num_tokens: int, num_logit_rows: int) -> int:
        """The number for one step."""
        return self.fixed + self.per_token * num_tokens + self.per_logit_row * num_logit_rows

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in all steps."""
        return self.per_token == self.per_logit_row == 0


ONE = Size(1)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of the memory of a value. `offset` is in elements, like strides.

    Attributes:
        is_opaque: a tensor of oneDNN's, which is no view of memory, and has no strides.
    """

    value: int
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    is_opaque: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator. Among its arguments are `View`s, `Size`s, tuples of these, and what never changes."""

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: tuple[View, ...]

    @property
    def name(self) -> str:
        """The operator's, as "aten::mul.Tensor"."""
        schema = self.operator._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def writes(self) -> bool:
        """Whether the operator writes into a tensor that it is given."""
        return self.operator._schema.is_mutable

    @property
    def is_pure(self) -> bool:
        """Whether it only computes. Of ours, some write into the cache."""
        return self.operator.namespace == "aten" and not self.writes

    @property
    def grows(self) -> bool:
        """Whether any of its sizes grows with the step."""
        sizes = (each for view in (*self.inputs, *self.outputs) for each in (*view.sizes, *view.strides, view.offset))
        numbers = (each for each in _flat(self.arguments) if isinstance(each, Size))
        return not all(size.is_fixed for size in (*sizes, *numbers))

    @property
    def inputs(self) -> list[View]:
        """All tensors among the arguments."""
        return [each for each in _flat(self.arguments) if isinstance(each, View)]

    @property
    def written(self) -> list[View]:
        """The tensors that the operator writes into."""
        schema = self.operator._schema.arguments
        return [
            each
            for argument, given in zip(schema, self.arguments, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in _flat((given,))
            if isinstance(each, View)
        ]


Constants: TypeAlias = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A forward pass as calls, in order.

    Attributes:
        constants: the values that are there before it begins, besides the inputs.
        outputs: what it gives.
    """

    calls: list[Call]
    constants: Constants
    outputs: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recording, and what the pass gave."""

    recording: Recording
    outputs: tuple[SeenTensor, ...]


def as_recorded_pass(runs: Sequence[RecordedRun], long_run: RecordedRun, longest: tuple[int, int]) -> RecordedPass:
    """The pass that was recorded with the `SAMPLES`, in this order.

    Args:
        long_run: without data, with `longest` tokens and logit rows. It must be what the others foretell.

    Raises:
        UnrecordableError: the recordings are not of one pass.
    """
    recordings = [run.recording for run in runs]
    first = recordings[0]
    operators = [call.operator for call in first.calls]
    if any([call.operator for call in run.recording.calls] != operators for run in (*runs, long_run)):
        raise UnrecordableError("it calls other operators for other lengths")
    join = _Joiner(longest)
    all_runs = (*runs, long_run)
    calls = [
        Call(each[0].operator, join(tuple(call.arguments for call in each)), join(tuple(call.outputs for call in each)))
        for each in zip(*(run.recording.calls for run in all_runs), strict=True)
    ]
    outputs = join(tuple(run.outputs for run in all_runs))
    made = {view.value for call in calls for view in call.outputs} - set(_seen_first_as_arguments(calls))
    constants = {
        number: _same_constant([recording.tensors[number] for recording in recordings])
        for number in range(NUM_INPUTS, len(first.tensors))
        if number not in made
    }
    for call in calls:
        if any(view.value in constants or view.value < NUM_INPUTS for view in call.written):
            raise UnrecordableError(f"it writes into what it keeps ({call.name})")
    return _simplified(RecordedPass(calls, constants, outputs), first)


def _seen_first_as_arguments(calls: Sequence[Call]) -> Iterator[int]:
    known: set[int] = set()
    for call in calls:
        for view in call.inputs:
            if view.value not in known:
                known.add(view.value)
                yield view.value
        known.update(view.value for view in call.outputs)


def _simplified(recorded: RecordedPass, recording: Recording) -> RecordedPass:
    """The same pass without views, without what comes out of constants alone, and without what nothing needs."""
    constants = dict(recorded.constants)
    known = set(constants) | set(range(NUM_INPUTS))
    calls: list[Call] = []
    for call in recorded.calls:
        inputs, made = call.inputs, {view.value for view in call.outputs} - known
        known |= made
        is_constant = bool(inputs) and all(view.value in constants for view in inputs) and not call.grows
        if call.is_pure and is_constant and all(_is_small(recording.tensors[value]) for value in made):
            constants |= {value: recording.tensors[value] for value in made}
        elif made or not call.is_pure:
            calls.append(call)
    needed, kept = {view.value for view in recorded.outputs}, []
    for call in reversed(calls):
        if not call.is_pure or needed.intersection(view.value for view in call.outputs):
            needed.update(view.value for view in call.inputs)
            kept.append(call)
    constants = {value: each for value, each in constants.items() if value in needed}
    return RecordedPass(kept[::-1], constants, recorded.outputs)


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_mkldnn and tensor.untyped_storage().nbytes() <= MAX_FOLDED_BYTES


def _same_constant(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that was there before the pass began, in each recording."""
    first, *others = tensors
    for other in others:
        if memory_of(other) != memory_of(first) and (first.is_mkldnn or not torch.equal(first, other)):
            raise UnrecordableError("it makes a tensor that depends on the length without torch's operators")
    return first


class _Joiner:
    """Makes one argument of what it was in each run: in those of the `SAMPLES`, and in the longest."""

    def __init__(self, longest: tuple[int, int]) -> None:
        self._longest = longest
        self._sizes: dict[tuple[int, ...], Size] = {}
        self._of_longest: dict[int, int] = {}
        """The memory that the longest run has in place of each. There may be more: without data, a view of a constant
        has a memory of its own."""

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """The argument. Raises `UnrecordableError` if it depends on the length in another way than sizes do."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise UnrecordableError("an argument changes its type with the length")
        if isinstance(first, SeenTensor):
            *others, longest = values
            same_memory = self._of_longest.setdefault(longest.memory, first.memory) == first.memory
            same_memory &= all(each.memory == first.memory for each in others)
            if not same_memory or any((v.dtype, len(v.sizes)) != (first.dtype, len(first.sizes)) for v in values):
                raise UnrecordableError("it takes other tensors for other lengths")
            sizes = self(tuple(each.sizes for each in values))
            strides = self._strides(sizes, tuple(each.strides for each in values))
            offset, is_opaque = self(tuple(each.offset for each in values)), strides is None
            return View(first.memory, first.dtype, sizes, strides or (), offset, is_opaque)
        if isinstance(first, tuple):
            if any(len(value) != len(first) for value in values):
                raise UnrecordableError("a list of arguments changes its length")
            return tuple(map(self, zip(*values, strict=True)))
        if isinstance(first, int) and not isinstance(first, bool):
            if values not in self._sizes:
                self._sizes[values] = self._size(values)
            return self._sizes[values]
        if any(value != first for value in values):
            raise UnrecordableError("an argument depends on the length")
        return first

    def _strides(self, sizes: tuple[Size, ...], strides: tuple[Any, ...]) -> Any:
        """Those of a tensor, or None. Without data, torch gives dimensions of one element other strides than with it,
        and nobody reads them."""
        if None in strides:
            return self(strides)
        of_dimensions = zip(sizes, zip(*strides, strict=True), strict=True)
        return tuple(Size(each[0]) if size == ONE else self(each) for size, each in of_dimensions)

    def _size(self, numbers: tuple[int, ...]) -> Size:
        """A number in each run."""
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
            raise UnrecordableError("a size does not grow evenly with the length")
        return size


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for each in arguments:
        if isinstance(each, tuple) and not isinstance(each, Size):
            yield from _flat(each)
        else:
            yield each
