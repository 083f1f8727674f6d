"""An input embedding with adapters."""

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.weights.linear_calls import is_watched


class AdaptedEmbedding(nn.Embedding):
    """An embedding that adds adapters' updates once attached. A subclass's operations on rows (a scale, say) apply to
    the sums."""

    _place: tuple[int, int] | None = None

    def look_in(self, step: int, place: int) -> int:
        """Attach it to a place and step of the kernels. Returns the place."""
        self._place = step, place
        return place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
        rows = super().forward(input)
        if self._place is None:
            return rows
        flat, ids = rows.view(-1, rows.shape[-1]), input.reshape(-1)
        adapted: torch.Tensor = torch.ops.inflight.adapted_rows.default(flat, ids, *self._place)
        return adapted.view(rows.shape)


def make_embedding_adaptable(model: PreTrainedModel) -> None:
    """Turn the input embedding of `model`, which is exclusively ours and not prepacked yet, into an
    `AdaptedEmbedding`."""
    embedding = model.get_input_embeddings()
    kind = type(embedding)
    if not isinstance(embedding, nn.Embedding) or is_watched(embedding):
        return
    embedding.__class__ = (
        AdaptedEmbedding if kind is nn.Embedding else type(f"Adapted{kind.__name__}", (kind, AdaptedEmbedding), {})
    )
