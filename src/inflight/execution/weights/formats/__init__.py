"""The formats that weights can have once they are prepacked. A format is a module of this folder with an object
`FORMAT`, found by its name; `contracts/config.py` lists the names that a caller can ask for (`QUANTIZATIONS`)."""

from importlib import import_module

from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.formats.plain import FORMAT as PLAIN

__all__ = ["PLAIN", "WeightFormat", "find_format"]


def find_format(quantization: str | None, arithmetic: str = "auto") -> WeightFormat:
    """The format that `EngineConfig.quantization` names, in the arithmetic that `quantization_arithmetic` names; None
    is the plain one."""
    found: WeightFormat = PLAIN if quantization is None else import_module(f"{__name__}.{quantization}").FORMAT
    return found.with_arithmetic(arithmetic)
