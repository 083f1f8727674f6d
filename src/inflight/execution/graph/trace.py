"""Watches one forward pass: which operators it calls, with which numbers, on which parts of which memory."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
"""What an operator must not be: its result, or the course of the model after it, would not be the same another time."""


class UnrecordableError(Exception):
    """A forward pass cannot be recorded. The message is the reason, as words that follow "because"."""


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A tensor as a view of its memory.

    Attributes:
        memory: the number of its storage, in the order in which storages were seen.
        strides: None for a tensor of oneDNN's, which has no elements in memory that others may read.
        offset: of its first element, in elements.
    """

    memory: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One call of an operator.

    Attributes:
        arguments: all that its schema names, in that order, each tensor as a `SeenTensor`.
    """

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: tuple[SeenTensor, ...]


def memory_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors that lie in the same storage, as long as one of them is kept."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run inside, as `calls`.

    Args:
        inputs: the tensors that are new in each forward pass. They have the first numbers.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[SeenCall] = []
        self.tensors: list[torch.Tensor] = []
        """One tensor of each memory, which keeps it from being used again."""
        self._numbers: dict[int, int] = {}
        for tensor in inputs:
            self.see(tensor)

    def see(self, tensor: torch.Tensor) -> SeenTensor:
        """Where a tensor lies."""
        number = self._numbers.setdefault(memory_of(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        if tensor.is_mkldnn:
            return SeenTensor(number, tensor.dtype, tuple(tensor.shape), None, 0)
        sizes, strides, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return SeenTensor(number, tensor.dtype, sizes, strides, offset)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and remember it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor without data for its device
            return func(*args, **kwargs)
        defaults, may_be_unrepeatable = _declared(func)
        given = [*args, *(kwargs.get(name, default) for name, default in defaults[len(args) :])]
        if may_be_unrepeatable and not _is_repeatable(func, given):
            raise UnrecordableError(f"it depends on the values of tensors ({func})")
        arguments = tuple(self._seen(each) for each in given)  # before the operator can write into them
        result = _run(func, args, kwargs, given)
        results = () if result is None else result if isinstance(result, list | tuple) else (result,)
        if not all(isinstance(each, torch.Tensor) for each in results):
            raise UnrecordableError(f"it depends on the values of tensors ({func})")
        outputs = tuple(self.see(each) for each in results)
        self.calls.append(SeenCall(func, arguments, outputs))
        return result

    def _seen(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.see(argument)
        if isinstance(argument, list | tuple):
            return tuple(map(self._seen, argument))
        return argument


@functools.cache
def _declared(operator: torch._ops.OpOverload) -> tuple[list[tuple[str, Any]], bool]:
    """The names and defaults of an operator's arguments, and whether its tags say that it may be unrepeatable."""
    defaults = [(argument.name, argument.default_value) for argument in operator._schema.arguments]
    return defaults, any(tag in operator.tags for tag in UNREPEATABLE)


def _run(operator: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Any]) -> Any:
    """Run an operator. Without data, what comes out of weights alone is computed all the same: a model may have put its
    own kind of tensor there. And a histogram of so many bins has so many, whatever the data."""
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
        with unset_fake_temporarily():
            return operator(*args, **kwargs)
    if operator == torch.ops.aten.bincount.default and isinstance(given[0], FakeTensor):
        return given[0].new_empty(given[2])
    return operator(*args, **kwargs)


def _is_repeatable(operator: torch._ops.OpOverload, given: Sequence[Any]) -> bool:
    """Whether a call of an operator that may be unrepeatable is not: dropout in evaluation; indexing by numbers, whose
    result has the size of its indices (with a mask its size depends on the mask's values); a histogram of a given
    number of bins, as of the experts that tokens choose."""
    if operator == torch.ops.aten.dropout.default:
        return given[2] is False
    if operator == torch.ops.aten.bincount.default:
        return bool(given[2] > 0)
    if operator in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return all(index is None or index.dtype in (torch.int64, torch.int32) for index in given[1])
    return False
