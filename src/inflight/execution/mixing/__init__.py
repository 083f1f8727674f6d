"""Sequence mixers: causal convolutions and linear recurrences over the row, with a state for each sequence."""

from inflight.execution.mixing.backends import CpuMixing, MixingBackend, ReferenceMixing, make_mixing
from inflight.execution.mixing.functions import mix
from inflight.execution.mixing.interface import MixerSpec, Operators, Recurrence

__all__ = [
    "CpuMixing",
    "MixerSpec",
    "MixingBackend",
    "Operators",
    "Recurrence",
    "ReferenceMixing",
    "make_mixing",
    "mix",
]
