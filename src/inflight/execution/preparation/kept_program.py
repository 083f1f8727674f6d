"""A compiled graph as plain data, for the next load of the same model.

A program refers to objects of its process: tensors, and the kernels' handles of layers and attention calls. These are
stored by their names in the model, as in an object file, and linked on load. Unnamed tensors, computed from weights
alone, are stored by value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from inflight.contracts.api.errors import ModelError
from inflight.execution.adapters import Adapters
from inflight.execution.executors import PackedExecutor
from inflight.execution.graph.encode import EncodedProgram
from inflight.execution.graph.trace import memory_of
from inflight.execution.weights.caught_matrices import CaughtMatrix
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.panels import PanelLinear

MAX_KEPT_BYTES = 2**20
"""Most bytes of a tensor stored by value."""


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A constant: a view of the memory of a named tensor, or of its own.

    Attributes:
        name: in the model; "" for a value.
        num_bytes: of the whole memory.
        sizes, strides, offset: in elements.
        value: all of the memory, of a tensor without a name.
    """

    name: str
    dtype: str
    num_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class KeptProgram:
    """An `EncodedProgram` independent of its process.

    Attributes:
        handles: the name of each handle's object, by place.
        caught: dtypes that matrices outside layers were multiplied in; their layers are made when they are first used.
    """

    codes: list[int]
    numbers: list[float]
    words: list[str]
    constants: list[KeptTensor]
    handles: dict[int, str]
    caught: list[str]
    needs_torch_threads: bool


def unlinked(executor: PackedExecutor) -> KeptProgram | None:
    """The program of an executor; None if it runs none, or one with unnamed objects."""
    program = executor.program
    if program is None:
        return None
    parts = dict(_parts(executor.model))
    named = {memory_of(part): name for name, part in reversed(parts.items()) if isinstance(part, torch.Tensor)}
    names = {handle: name for name, handle in _handles(executor, parts).items()}
    try:
        handles = {place: names[kind, program.codes[place]] for place, kind in program.handles.items()}
        constants = [_kept(each, named.get(memory_of(each), "")) for each in program.constants]
    except (KeyError, ValueError):
        return None
    codes = [0 if place in handles else int(code) for place, code in enumerate(program.codes)]
    caught = {str(dtype) for part in parts.values() if isinstance(part, CaughtMatrix) for dtype in part.prepacked}
    threads = program.needs_torch_threads
    return KeptProgram(codes, program.numbers, program.words, constants, handles, sorted(caught), threads)


def linked(kept: KeptProgram, executor: PackedExecutor) -> EncodedProgram:
    """Link the program to an identically prepared model's executor. Raises `ModelError` if it does not fit."""
    for module in executor.model.modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, CaughtMatrix):
            for dtype in kept.caught:
                weight.to(_dtype(dtype)).linear()  # type: ignore[attr-defined]
    parts = dict(_parts(executor.model))
    handles = _handles(executor, parts)
    try:
        codes = list(kept.codes)
        kinds = {}
        for place, name in kept.handles.items():
            kinds[place], codes[place] = handles[name]
        constants = [_constant(each, parts) for each in kept.constants]
    except (KeyError, ValueError, RuntimeError) as error:
        raise ModelError(f"a kept program does not fit its model: {error!r}") from error
    return EncodedProgram(codes, kept.numbers, kept.words, constants, kinds, kept.needs_torch_threads)


def _handles(executor: PackedExecutor, parts: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Kind and kernels' handle of every object that has one, by name."""
    handles = {f"call {ordinal}": ("call", number) for ordinal, number in enumerate(executor.attention_calls)}
    mixers = () if executor.mixing is None else executor.mixing.handles
    handles |= {f"mixer {ordinal}": ("mixer", number) for ordinal, number in enumerate(mixers)}
    placings = () if executor.encoder_outputs is None else executor.encoder_outputs.placing.handles
    handles |= {f"placing {layer}": ("placing", number) for layer, number in enumerate(placings)}
    if isinstance(executor.adapters, Adapters):
        handles["step"] = "step", executor.adapters.layers.step
    for name, part in parts.items():
        if isinstance(part, PanelLinear):
            handles[name] = "linear", part.number
        if isinstance(part, PrepackedExperts) and part.number is not None:
            handles[name] = "experts", part.number
    return handles


def _kept(tensor: torch.Tensor, name: str) -> KeptTensor:
    """A constant `[…]`, by its name, or "" if it has none. Raises `ValueError` for a large tensor that has no name."""
    memory = tensor.untyped_storage()
    if not name and memory.nbytes() > MAX_KEPT_BYTES:
        raise ValueError
    value = b"" if name else bytes(torch.empty(0, dtype=torch.uint8).set_(memory).numpy())
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    return KeptTensor(name, str(tensor.dtype), memory.nbytes(), sizes, strides, int(tensor.storage_offset()), value)


def _constant(kept: KeptTensor, parts: Mapping[str, Any]) -> torch.Tensor:
    """The tensor `[…]` of a kept constant, among these parts of the model. Raises `KeyError` or `ValueError` if it does
    not fit them."""
    dtype = _dtype(kept.dtype)
    base = parts[kept.name] if kept.name else torch.frombuffer(bytearray(kept.value), dtype=dtype)
    memory = base.untyped_storage()
    if memory.nbytes() != kept.num_bytes:
        raise ValueError(f"{kept.name} lies in {memory.nbytes()} bytes, not in {kept.num_bytes}")
    return torch.empty(0, dtype=dtype).set_(memory, kept.offset, kept.sizes, kept.strides)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All tensors of a model and our objects in it, by name: the same for identically prepared models."""
    seen: set[int] = set()

    def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        is_ours = type(value).__module__.startswith("inflight.")
        if isinstance(value, torch.Tensor) or is_ours:
            if id(value) in seen:
                return
            seen.add(id(value))
            yield name, value
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list | tuple):
            items = list(enumerate(value))
        elif is_ours and is_dataclass(value):
            items = [(field.name, getattr(value, field.name)) for field in fields(value)]
        elif is_ours:
            items = list(getattr(value, "__dict__", {}).items())
        else:
            return
        for key, each in items:
            yield from walk(f"{name}.{key}", each)

    for name, module in model.named_modules():
        yield from walk(name, module)
        yield from walk(name, {key: value for key, value in vars(module).items() if key != "_modules"})
