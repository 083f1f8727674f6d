"""Prints the drawings of `docs/graph.md`: a layer of the embedded model as nodes and items, and one of its row kernels.

python tools/draw_graph.py
"""

from collections.abc import Iterable

from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.execution.executors import PackedExecutor
from inflight.execution.graph.fuse import FusedNode, Work, fuse
from inflight.execution.graph.graph import Graph, Node
from inflight.execution.graph.program import Instruction, Operand, RowKernel, Size, View
from inflight.execution.preparation.prepare import prepare

LINEARS_OF_A_LAYER = 4


def drawings() -> tuple[str, str]:
    """The second layer of the embedded model in float32, and the last of its row kernels."""
    executor = prepare(str(DEMO_MODEL), EngineConfig(device="cpu", dtype="float32", num_blocks=8)).executor
    assert isinstance(executor, PackedExecutor)
    graph = executor.trace(max_tokens=64)
    work, stored = fuse(graph)
    ends = [place for place, each in enumerate(work) if isinstance(each, Node) and each.name == "inflight::linear"]
    first, last = ends[LINEARS_OF_A_LAYER - 1] + 1, ends[2 * LINEARS_OF_A_LAYER - 1]
    lines = [line for place in range(first, last + 1) for line in _item(graph, work[place], stored[place])]
    kernel, to_store = work[last - 1], stored[last - 1]
    assert isinstance(kernel, FusedNode)
    return "\n".join(lines), _kernel(kernel.row_kernel(to_store))


def _item(graph: Graph, work: Work, to_store: list[int]) -> Iterable[str]:
    """A line for each node of an item."""
    if isinstance(work, Node):
        yield f"{_node(work):<38}   {'linear' if work.name == 'inflight::linear' else 'operator'}"
        return
    nodes = [node for node in graph.nodes if node.outputs and node.outputs[0].value in work.held]
    sides = [f"row kernel over {_sizes(work.space)}", f"  stores {', '.join(f'%{value}' for value in to_store)}"]
    for number, node in enumerate(nodes):
        yield f"{_node(node):<38} | {sides[number] if number < len(sides) else ''}".rstrip()


def _node(node: Node) -> str:
    name = node.name.partition("::")[2].partition(".")[0]
    call = f"{name}({', '.join(f'%{view.value}' for view in node.inputs)})"
    return f"{_view(node.outputs[0])} = {call}" if node.outputs else call


def _view(view: View) -> str:
    return f"%{view.value} {_sizes(view.sizes)}"


def _sizes(sizes: Iterable[Size]) -> str:
    return f"[{','.join('T' if size == Size(0, 1) else str(size.fixed) for size in sizes)}]"


def _kernel(kernel: RowKernel) -> str:
    return "\n".join(map(_instruction, kernel.instructions))


def _instruction(each: Instruction) -> str:
    name = each.code.name.lower()
    if each.rows is None:
        operands = ", ".join(map(_operand, (each.a, each.b)[: each.code.num_operands]))
        return f"{_operand(each.to)} = {name}({operands})"
    row = f"%{each.rows.value}[row, {each.rows.offset.fixed} : {each.rows.offset.fixed + each.length}]"
    return f"{_operand(each.to)} = load({row})" if not each.code.num_operands else f"store({_operand(each.a)}, {row})"


def _operand(operand: Operand) -> str:
    return f"r{operand.index}" if operand.offset == 0 else f"r{operand.index}[{operand.offset}:]"


if __name__ == "__main__":
    print(*drawings(), sep="\n\n")
