"""The interface of quantization methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, ClassVar

import torch

from inflight.execution.grouped.weight import Groups


class QuantizationMethod(ABC):
    """A checkpoint's format of quantized weights, each in several tensors (parts).

    Args:
        settings: `quantization_config` of its `config.json`. Raises `ModelError` for what cannot be read.

    Attributes:
        endings: name endings of parts, which also name them here.
        parameter: the ending of the parameter's name.
        kind: the name of such weights in `model_info`.
        has_inputs_first: whether the model has the weight transposed, `[in, out]`.
    """

    endings: ClassVar[tuple[str, ...]]
    parameter: ClassVar[str] = ""
    has_inputs_first: ClassVar[bool] = False
    kind: str

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def is_quantised(self, parts: Set[str]) -> bool:
        """Whether these are the parts of a quantised weight."""

    def is_stacked(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether every part, of any dtype, is `[experts, …]`."""
        return False

    @abstractmethod
    def read(self, parts: Mapping[str, torch.Tensor]) -> Groups | torch.Tensor:
        """The weight `[out, in]` of these parts, or its values, float32, where no kernel reads it.

        Args:
            parts: the tensors of one matrix, by ending, as the method stores them.

        Raises:
            KeyError: a part is missing.
            ValueError: a part cannot be read.
            IndexError, RuntimeError, StopIteration: the sizes of parts do not fit.
        """
