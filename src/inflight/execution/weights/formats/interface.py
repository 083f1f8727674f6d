"""The interface of weight formats."""

import copy
from abc import ABC, abstractmethod
from typing import Self

import torch
from transformers import PreTrainedModel

from inflight.execution.grouped.rounding import is_by_channels
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.weights.grouped_linear import ExactGroupedLinear, GroupedLinear, prefers_int8_activations
from inflight.execution.weights.int8_linear import int8_layer, sums_int8
from inflight.execution.weights.prepacked_linear import PrepackedLinear, can_prepack


class WeightFormat(ABC):
    """A storage format of prepacked weights of linear layers and experts.

    Attributes:
        name: "plain", or as `EngineConfig.quantization` says it.
        is_lossless: whether every weight keeps its value.
        is_exact: the arithmetic of grouped weights: in the model's dtype, or with rounded activations.
    """

    name: str
    is_lossless: bool
    is_exact: bool = True

    def with_arithmetic(self, name: str) -> Self:
        """The same format with the arithmetic of `EngineConfig.quantization_arithmetic`."""
        chosen = copy.copy(self)
        chosen.is_exact = name == "exact" or (name == "auto" and not prefers_int8_activations())
        return chosen

    def rounds(self, model: PreTrainedModel) -> bool:
        """Whether prepacking rounds anything that is not rounded in `model`, not prepacked yet. If so, the prepacked
        model is held only to a loose tolerance, which finds gross mistakes."""
        weights = (parameter.data for parameter in model.parameters())
        are_rounded = any(isinstance(each, GroupedWeight) and each.grouping.has_integers for each in weights)
        return not self.is_lossless or (are_rounded and not self.is_exact)

    @abstractmethod
    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """The layer class on this CPU for weights of `dtype` (float32 or bfloat16)."""

    def prepack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> PrepackedLinear:
        """Make a layer from a weight `[out, in]`, float32 or bfloat16, and a bias `[out]`; see `PrepackedLinear`. A
        grouped weight is kept."""
        if isinstance(weight, GroupedWeight) and weight.is_transposed:
            weight = weight.values()
        layer = self._layer_in_groups(weight) if isinstance(weight, GroupedWeight) else self.layer_class(weight.dtype)
        return layer(weight, bias, activation, variant)

    def _layer_in_groups(self, weight: GroupedWeight) -> type[PrepackedLinear]:
        if self.is_exact:
            return ExactGroupedLinear
        by_channels = int8_layer()
        return by_channels if is_by_channels(weight) and sums_int8(by_channels) else GroupedLinear

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """Why `model` cannot have this format here, in words after the format's name; None: it can."""
        if can_prepack(model):
            return None
        return f"needs float32, or bfloat16 where the CPU supports it, on a CPU; not {model.dtype} on {model.device}"
