"""Executors: a model run as one ragged row, as batches of rows, or sequence by sequence."""

from inflight.execution.executors.interface import Capabilities, Executor
from inflight.execution.executors.packed import PackedExecutor, require_packed
from inflight.execution.executors.rows import RowsExecutor
from inflight.execution.executors.sequential import SequentialExecutor

__all__ = ["Capabilities", "Executor", "PackedExecutor", "RowsExecutor", "SequentialExecutor", "require_packed"]
