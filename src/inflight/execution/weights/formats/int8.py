"""int8 weights with a scale per output channel, and int8 activations with a scale per row."""

import torch
from transformers import PreTrainedModel

from inflight.execution.weights.formats.interface import WeightFormat
from inflight.execution.weights.int8_linear import int8_layer, sums_int8
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class _Int8(WeightFormat):
    """See `WeightFormat`."""

    name = "int8"
    is_lossless = False

    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """See `WeightFormat`."""
        return int8_layer()

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """See `WeightFormat`."""
        reason = super().why_unusable(model)
        if reason is None and not sums_int8(int8_layer()):
            reason = "needs our kernels (AVX2 and a C++ compiler), or a CPU that sums int8 in 32 bits (VNNI or AMX)"
        return reason


FORMAT = _Int8()
