"""Input embeddings without their own weight: tied ones read rows from the prepacked output head, grouped ones from the
grouped weight."""

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.weights.prepacked_linear import PrepackedLinear, StoredRows

HALF_A_STEP = 0.51
"""The largest rounding error relative to the scale: half, plus floating-point error."""


class PrepackedEmbedding(nn.Embedding):
    """An embedding without its own weight."""

    weight: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
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
