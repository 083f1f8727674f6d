"""The base class of prepacked linear layers, whose weight is laid out once, at load, for its kernel.

`panels` and `onednn` have the layers, `formats` chooses one for each format. A prepacked layer gives a row the same
bits beside any other rows. (oneDNN's layers do so from two rows on; callers never run a single one.)

Input embeddings without their own weight: tied ones read rows from the prepacked output head, grouped ones from the
grouped weight.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.kernels import has_panels

HALF_A_STEP = 0.51
"""The largest rounding error relative to the scale: half, plus floating-point error."""


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
    """A weight whose rows can be read from its layer.

    Attributes:
        scales: `[out]` float32, the quantization step of each row; None: not quantized.
    """

    @property
    def scales(self) -> torch.Tensor | None: ...

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by index: `[…]` int64 to `[…, in]`."""
        ...


@dataclass(frozen=True)
class WeightLayout:
    """The layout of a prepacked weight, valid while its layer exists: element (row, column) is
    `elements[row_places[row] + column_places[column]]`.

    Attributes:
        elements: the whole memory, `[size]` in the stored dtype.
        row_places: `[out]` int64.
        column_places: `[in]` int64.
        scales: `[out]` float32, factors of the rows; None: none.
    """

    elements: torch.Tensor
    row_places: torch.Tensor
    column_places: torch.Tensor
    scales: torch.Tensor | None = None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by index: `[…]` int64 to `[…, in]`, in the stored dtype, or float32 if scaled."""
        each = numbers.reshape(-1)  # indexing by a single number would read its value
        rows = self.elements[self.row_places[each][:, None] + self.column_places]
        rows = rows if self.scales is None else rows * self.scales[each][:, None]
        return rows.view(*numbers.shape, len(self.column_places))


class PrepackedLinear(nn.Module, ABC):
    """`activation(x @ weight.T + bias)` with a prepacked weight.

    Args:
        weight: `[out, in]`, float32 or bfloat16; not kept.
        bias: `[out]` or None; copied.
        activation: "none", "relu", "swish", or "gelu" with the variant "none" or "tanh".

    Attributes:
        prepacked: the weight, `[…]` in the layer's own layout and dtype.
        scales: `[out]` float32, if the stored weight has a scale per output channel.
    """

    prepacked: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = "none"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty(
            weight.shape, dtype=weight.dtype, device="meta"
        )  # empty; gives code that asks the weight's dtype
        self.bias = None if bias is None else bias.clone()  # neither in a checkpoint's file nor in a caller's model
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
        """Reads rows of the weight; None if the layout is unknown."""

    def extra_repr(self) -> str:
        """For `print(model)`."""
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return f"in_features={self.in_features}, out_features={self.out_features}{activation}"


class PrepackedEmbedding(nn.Embedding):
    """An embedding without its own weight."""

    weight: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` int64 to `[…, hidden]` in the table's dtype."""
        return self.weight.rows(input)  # type: ignore[no-any-return]


class PrepackedTable:
    """Replaces such an embedding's weight `[vocabulary, hidden]`, also for models that index it directly.

    Args:
        shape: the weight's.
        dtype: of the rows.
        owner: owner of the layout's memory, kept alive.
    """

    def __init__(
        self, layout: StoredRows, shape: torch.Size, dtype: torch.dtype, owner: PrepackedLinear | None = None
    ) -> None:
        self.layout, self.shape, self.dtype, self.owner = layout, shape, dtype, owner
        self.device = torch.device("cpu")

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Row indices `[…]` int64 to `[…, hidden]`."""
        return self.layout.rows(numbers).to(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`weight[index]` of the weight `[vocabulary, hidden]`: `[…]` in the rows' dtype."""
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self.rows(torch.arange(len(self))[first])
        return rows[..., *others] if others else rows

    def __len__(self) -> int:
        return self.shape[0]


def share_prepacked_weight(embedding: nn.Embedding, head: PrepackedLinear) -> None:
    """Let `embedding` read its rows from `head`, whose weight is prepacked. The embedding keeps its own weight if the
    head's layout is unknown, or a sample of rows is misread."""
    layout = head.layout()
    if layout is None:
        return
    sample = torch.linspace(0, head.out_features - 1, 64, dtype=torch.float64).long()
    error = (layout.rows(sample) - functional.embedding(sample, embedding.weight)).abs()
    allowed = 0 if layout.scales is None else HALF_A_STEP * layout.scales[sample, None]
    if not (error <= allowed).all():
        return
    _replace_weight(embedding, PrepackedTable(layout, embedding.weight.shape, embedding.weight.dtype, head))


def read_rows_in_groups(embedding: nn.Embedding) -> None:
    """Let `embedding`, whose weight is grouped and in no layer, read its rows with our operator."""
    weight = embedding.weight.data
    assert isinstance(weight, GroupedWeight)
    _replace_weight(embedding, PrepackedTable(weight.stored_rows, weight.shape, weight.dtype))


def _replace_weight(embedding: nn.Embedding, table: PrepackedTable) -> None:
    kind = type(embedding)
    # A subclass's forward pass (one that scales, say) runs first, and finds the lookup in its base class.
    embedding.__class__ = (
        PrepackedEmbedding if kind is nn.Embedding else type(f"Tied{kind.__name__}", (kind, PrepackedEmbedding), {})
    )
    embedding._parameters.clear()
    cast(PrepackedEmbedding, embedding).weight = table
