"""What all prepacked linear layers have in common: a weight that was laid out once, at load, for how it will be read.

`panels` and `onednn` have the layers, `formats` says which of them holds a weight in which format. A prepacked layer
gives a row the same bits beside any number of other rows. (oneDNN's layers do so from two rows on: a single row takes
another path there; callers never run one alone.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.kernels import has_panels


def can_prepack(model: PreTrainedModel) -> bool:
    """Whether this machine has prepacked layers for the model's device and dtype."""
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    return has_panels(model.dtype) or _has_onednn(model.dtype)


def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class StoredRows(Protocol):
    """A weight whose rows can be read out of the layer that holds it.

    Attributes:
        scales: `[out]` float32, how coarsely each row was rounded when it was prepacked; None: it was not.
    """

    @property
    def scales(self) -> torch.Tensor | None: ...

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers: `[…]` int64 to `[…, in]`."""
        ...


@dataclass(frozen=True)
class WeightLayout:
    """Where the elements of a prepacked weight lie, valid as long as its layer exists: element (row, column) is
    `elements[row_places[row] + column_places[column]]`.

    Attributes:
        elements: the whole memory, `[size]` in the dtype that is stored.
        row_places: `[out]` int64.
        column_places: `[in]` int64.
        scales: `[out]` float32, what each row's elements are multiplied by; None: nothing.
    """

    elements: torch.Tensor
    row_places: torch.Tensor
    column_places: torch.Tensor
    scales: torch.Tensor | None = None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The weight's rows of these numbers: `[…]` int64 to `[…, in]`, in the stored dtype, or float32 if scaled."""
        each = numbers.reshape(-1)  # indexing by a single number would read its value
        rows = self.elements[self.row_places[each][:, None] + self.column_places]
        rows = rows if self.scales is None else rows * self.scales[each][:, None]
        return rows.view(*numbers.shape, -1)


class PrepackedLinear(nn.Module, ABC):
    """`activation(x @ weight.T + bias)` with a weight that only this layer can read.

    Args:
        weight: `[out, in]`, float32 or bfloat16; not kept.
        bias: `[out]` or None; copied.
        activation: "none", "relu", "swish", or "gelu" with the variant "none" or "tanh".

    Attributes:
        prepacked: the weight in the layer's own layout.
        scales: `[out]` float32, where the stored weight has a scale for each output channel.
    """

    prepacked: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty(
            weight.shape, dtype=weight.dtype, device="meta"
        )  # for those who ask for its dtype: it has no elements
        self.bias = None if bias is None else bias.clone()  # not in a checkpoint's file, nor a caller's model
        self.activation, self.variant = activation, variant
        self.scales: torch.Tensor | None = None
        self._prepack(weight)

    @abstractmethod
    def _prepack(self, weight: torch.Tensor) -> None:
        """Lay out a weight `[out, in]`."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in]` to `[…, out]`, float32 or bfloat16."""

    @abstractmethod
    def layout(self) -> StoredRows | None:
        """What reads rows of the weight; None if it is not known where they lie."""

    def extra_repr(self) -> str:
        """For `print(model)`."""
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return f"in_features={self.in_features}, out_features={self.out_features}{activation}"
