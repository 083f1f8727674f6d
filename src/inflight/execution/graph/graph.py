"""`Graph`: a forward pass of symbolic size, as nodes, with constants folded and dead nodes removed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inflight.execution.graph.program import NUM_INPUTS, Size, View

MAX_FOLDED_BYTES = 2**20
"""Most memory of a folded constant."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator call. Arguments are `View`s, `Size`s, constants, and tuples of these."""

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: tuple[View, ...]

    @property
    def name(self) -> str:
        """The operator's name, as in "aten::mul.Tensor"."""
        schema = self.operator._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def mutates(self) -> bool:
        """Whether the operator writes into one of its arguments."""
        return self.operator._schema.is_mutable

    @property
    def is_pure(self) -> bool:
        """Whether it has no side effects. Some of our operators write into the cache."""
        return (self.operator.namespace == "aten" or self.name == "inflight::activate") and not self.mutates

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


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass: its nodes, in order, and its constants `[…]`, by value."""

    nodes: list[Node]
    constants: dict[int, torch.Tensor]
    outputs: tuple[View, ...]


def simplified(graph: Graph, tensors: Sequence[torch.Tensor]) -> Graph:
    """The same graph without views, with constants folded and dead nodes removed.

    Args:
        tensors: a tensor `[…]` of any dtype for each value, from a run with data.
    """
    constants = dict(graph.constants)
    known = set(constants) | set(range(NUM_INPUTS))
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs, made = node.inputs, {view.value for view in node.outputs} - known
        known |= made
        is_constant = bool(inputs) and all(view.value in constants for view in inputs) and not node.grows
        results = {value: tensors[value] for value in made}
        are_small = all(not r.is_mkldnn and r.untyped_storage().nbytes() <= MAX_FOLDED_BYTES for r in results.values())
        if node.is_pure and is_constant and are_small:
            constants |= results
        elif made or not node.is_pure:
            nodes.append(node)
    needed, kept = {view.value for view in graph.outputs}, []
    for node in reversed(nodes):
        if not node.is_pure or needed.intersection(view.value for view in node.outputs):
            needed.update(view.value for view in node.inputs)
            kept.append(node)
    constants = {value: each for value, each in constants.items() if value in needed}
    return Graph(kept[::-1], constants, graph.outputs)


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for each in arguments:
        if isinstance(each, tuple):
            yield from _flat(each)
        else:
            yield each
