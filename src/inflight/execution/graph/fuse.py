"""Which calls of a pass run together, as row kernels: a list of calls becomes a shorter list of work.

A call joins the first kernel that it can, among those that come after all it reads, else it begins one. So it may run
earlier than it was called, never later; only what computes does, never what writes.
"""

from collections.abc import Sequence
from typing import TypeAlias

from inflight.execution.graph.graph import Call, RecordedPass
from inflight.execution.graph.row_kernel import CannotJoinError, RowKernel, can_begin, space_of

Work: TypeAlias = Call | RowKernel


def fused(recorded: RecordedPass) -> tuple[list[Work], list[list[int]]]:
    """The work of a pass, and for each piece of it the values that it has to write to memory."""
    work: list[Work] = []
    made_by: dict[int, int] = {}
    read_by: dict[int, set[int]] = {}  # which pieces of work read a value
    first = 0  # what a call may join begins here
    for call in recorded.calls:
        makers = [made_by[view.value] for view in call.inputs if view.value in made_by]
        place = _place(call, work, max([first, *makers]))
        if place is None:
            place = len(work)
            work.append(call)
            if call.writes:
                first = len(work)
        made_by |= {view.value: place for view in call.outputs if view.value not in made_by}
        for view in call.inputs:
            read_by.setdefault(view.value, set()).add(place)
    for view in recorded.outputs:
        read_by.setdefault(view.value, set()).add(len(work))
    stored: list[list[int]] = [[] for _ in work]
    for value, place in made_by.items():
        if isinstance(work[place], RowKernel) and read_by.get(value, set()) - {place}:
            stored[place].append(value)
    return work, stored


def _place(call: Call, work: list[Work], first: int) -> int | None:
    """Where a call has become part of a kernel; None: it is a piece of work of its own."""
    if call.writes or not can_begin(call):
        return None
    for place, kernel in enumerate(work[first:], first):
        if isinstance(kernel, RowKernel) and _joins(call, kernel):
            return place
    kernel = RowKernel(space_of(call.outputs[0]))
    if not _joins(call, kernel):
        return None
    work.append(kernel)
    return len(work) - 1


def _joins(call: Call, kernel: RowKernel) -> bool:
    try:
        kernel.join(call)
    except CannotJoinError:
        return False
    return True


def last_uses(work: Sequence[Work], recorded: RecordedPass) -> list[list[int]]:
    """For each piece of work, the values that nothing needs after it."""
    released: list[list[int]] = [[] for _ in work]
    seen = {*(view.value for view in recorded.outputs), *recorded.constants}
    for place in range(len(work) - 1, -1, -1):
        for value in _values(work[place]) - seen:
            released[place].append(value)
            seen.add(value)
    return released


def _values(work: Work) -> set[int]:
    """All that it reads or makes."""
    if isinstance(work, Call):
        return {view.value for view in (*work.inputs, *work.outputs)}
    return {each.rows.value for each in work.instructions if each.rows is not None} | set(work.held)
