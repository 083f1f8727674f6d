"""Adapters (LoRA): small matrices that change a few layers, for some rows of a step, each row its own.

`checkpoint` reads them as PEFT writes them, `layers` knows which layers of a model can have them, `packed_adapter` lays
them out for the kernels, and `Adapters` keeps those in memory that are needed, and gives each step's rows their own.
"""

from inflight.execution.adapters.adapted_embedding import make_embedding_adaptable
from inflight.execution.adapters.adapters import Adapters
from inflight.execution.adapters.checkpoint import AdapterCheckpoint

__all__ = ["AdapterCheckpoint", "Adapters", "make_embedding_adaptable"]
