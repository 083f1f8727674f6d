"""Formats of prepacked weights. Grouped weights keep their own."""

from inflight.execution.weights.formats.bfloat16 import FORMAT as BFLOAT16
from inflight.execution.weights.formats.int8 import FORMAT as INT8
from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.formats.plain import FORMAT as PLAIN

__all__ = ["INT8", "PLAIN", "WeightFormat", "find_format"]


def find_format(quantization: str | None, arithmetic: str = "auto") -> WeightFormat:
    """The format for `EngineConfig.quantization`, with the arithmetic of `quantization_arithmetic`."""
    return {"int8": INT8, "bfloat16": BFLOAT16}.get(quantization or "", PLAIN).with_arithmetic(arithmetic)
