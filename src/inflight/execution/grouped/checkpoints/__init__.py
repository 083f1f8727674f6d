"""Quantised checkpoints that are kept as they are: which tensors hold a weight, and what they stand for.

A method of quantisation is a module of this folder; `METHODS` has them by the name that `config.json` gives them.
"""

from collections.abc import Mapping
from typing import Any

from inflight.contracts.errors import ModelError
from inflight.execution.grouped.checkpoints.awq import Awq
from inflight.execution.grouped.checkpoints.compressed_tensors import CompressedTensors
from inflight.execution.grouped.checkpoints.eight_bit_floats import EightBitFloats
from inflight.execution.grouped.checkpoints.four_bit_floats import FourBitFloats
from inflight.execution.grouped.checkpoints.gptq import Gptq
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod

__all__ = ["METHODS", "QuantizationMethod", "find_method"]

METHODS: dict[str, type[QuantizationMethod]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": EightBitFloats,
    "fbgemm_fp8": EightBitFloats,
    "mxfp4": FourBitFloats,
}
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Layouts of other methods that AutoRound writes."""


def find_method(settings: Mapping[str, Any]) -> QuantizationMethod | None:
    """The method that a `quantization_config` names; None if it is none of ours. Raises `ModelError` for what it cannot
    read."""
    name = str(settings.get("quant_method"))
    if name == "auto-round":
        layout = str(settings.get("packing_format"))
        if layout not in AUTO_ROUND:
            raise ModelError(f"AutoRound in the layout {layout!r} cannot be read; {', '.join(AUTO_ROUND)} can")
        name = AUTO_ROUND[layout]
    method = METHODS.get(name)
    return None if method is None else method(settings)
