"""Reads quantized checkpoints without requantization: the tensors of a weight, and their meaning.

Each quantization method is a module of this folder; `METHODS` has them by their name in `config.json`.
"""

from collections.abc import Mapping
from typing import Any

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.checkpoints.compressed_tensors import CompressedTensors
from inflight.execution.grouped.checkpoints.floats import EightBitFloats, FourBitFloats
from inflight.execution.grouped.checkpoints.integers import Awq, BitNet, Gptq
from inflight.execution.grouped.checkpoints.interface import QuantizationMethod

__all__ = ["METHODS", "QuantizationMethod", "find_method"]

METHODS: dict[str, type[QuantizationMethod]] = {
    "gptq": Gptq,
    "awq": Awq,
    "bitnet": BitNet,
    "compressed-tensors": CompressedTensors,
    "fp8": EightBitFloats,
    "fbgemm_fp8": EightBitFloats,
    "mxfp4": FourBitFloats,
}
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Layouts of other methods that AutoRound writes."""


def find_method(settings: Mapping[str, Any]) -> QuantizationMethod | None:
    """The method of a `quantization_config`; None if it is not ours. Raises `ModelError` for unsupported settings."""
    name = str(settings.get("quant_method"))
    if name == "auto-round":
        layout = str(settings.get("packing_format"))
        if layout not in AUTO_ROUND:
            raise ModelError(f"AutoRound in the layout {layout!r} cannot be read; {', '.join(AUTO_ROUND)} can")
        name = AUTO_ROUND[layout]
    method = METHODS.get(name)
    if method is BitNet and (settings.get("quantization_mode") == "online" or settings.get("use_rms_norm")):
        return None  # layers that round weights while they run, or have norms
    return None if method is None else method(settings)
