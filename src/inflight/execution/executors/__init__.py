"""Executors: a model run as one ragged row, as batches of rows, sequence by sequence, or by its own `generate`."""

from inflight.execution.executors.generate import GenerateExecutor
from inflight.execution.executors.interface import Capabilities, Executor
from inflight.execution.executors.packed import PackedExecutor, require_packed
from inflight.execution.executors.rows import RowsExecutor
from inflight.execution.executors.sequential import SequentialExecutor

__all__ = [
    "Capabilities",
    "Executor",
    "GenerateExecutor",
    "PackedExecutor",
    "RowsExecutor",
    "SequentialExecutor",
    "require_packed",
]
