"""Ways through a model. One so far: `packed`, the ragged row."""

from inflight.execution.executors.interface import Executor
from inflight.execution.executors.packed import PackedExecutor

__all__ = ["Executor", "PackedExecutor"]
