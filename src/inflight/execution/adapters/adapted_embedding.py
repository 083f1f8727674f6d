"""An input embedding to whose rows adapters can add something."""

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.execution.weights.linear_calls import is_watched


class AdaptedEmbedding(nn.Embedding):
    """An embedding that looks for what is added once it was told where. What a subclass does to the rows (a scale, say)
    it does to the sums."""

    _place: tuple[int, int] | None = None

    def look_in(self, step: int, place: int) -> int:
        """Look there from now on: in a place, for the rows of a step, which the kernels know by numbers. Returns the
        place."""
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
    """Let the input embedding of `model`, which is ours alone and not prepacked yet, be an `AdaptedEmbedding`."""
    embedding = model.get_input_embeddings()
    kind = type(embedding)
    if not isinstance(embedding, nn.Embedding) or is_watched(embedding):
        return
    embedding.__class__ = (
        AdaptedEmbedding if kind is nn.Embedding else type(f"Adapted{kind.__name__}", (kind, AdaptedEmbedding), {})
    )
