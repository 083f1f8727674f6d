"""LoRA adapters: low-rank updates of some layers, chosen per row of a step.

`checkpoint` reads PEFT's files, `layers` finds the layers that can have adapters, `packed_adapter` lays them out for
the kernels, and `Adapters` caches them in memory and assigns them to each step's rows.
"""

from inflight.execution.adapters.adapters import Adapters
from inflight.execution.adapters.checkpoint import AdapterCheckpoint
from inflight.execution.adapters.layers import make_embedding_adaptable

__all__ = ["AdapterCheckpoint", "Adapters", "make_embedding_adaptable"]
