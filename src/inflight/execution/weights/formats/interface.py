"""What a format of weights decides."""

from abc import ABC, abstractmethod

import torch
from transformers import PreTrainedModel

from inflight.execution.weights.prepacked_linear import PrepackedLinear, can_prepack


class WeightFormat(ABC):
    """How the weights of linear layers and experts are stored once they are prepacked.

    Attributes:
        name: the module's, and as `EngineConfig.quantization` says it.
        is_lossless: whether every weight keeps its value. If so, a prepacked model is held to the tolerance of its
            dtype; if not, only to a loose one, which finds mistakes.
        largest_error: the relative error that rounding into this format may explain. (Results that have nothing to do
            with the right ones have one of 1.4, and no results at all one of 1.)
    """

    name: str
    is_lossless: bool
    largest_error = 0.5

    @property
    def of_head(self) -> "WeightFormat":
        """The format of the output head, which often is the embedding, too."""
        return self

    @abstractmethod
    def layer_class(self, dtype: torch.dtype) -> type[PrepackedLinear]:
        """The layer for this CPU, for weights that come in `dtype` (float32 or bfloat16)."""

    def prepack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> PrepackedLinear:
        """A layer from a weight `[out, in]`, float32 or bfloat16, and a bias `[out]`; see `PrepackedLinear`."""
        return self.layer_class(weight.dtype)(weight, bias, activation, variant)

    def why_unusable(self, model: PreTrainedModel) -> str | None:
        """Why `model` cannot have this format here, as words that follow the format's name; None: it can."""
        if can_prepack(model):
            return None
        return f"needs float32, or bfloat16 where the CPU supports it, on a CPU; not {model.dtype} on {model.device}"
