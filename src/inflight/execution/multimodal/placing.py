"""`Placing`: puts encoder outputs in place of input embeddings: on a CPU in the kernels, so that a graph has it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.multimodal.encoder import Part, Rows


class _PlacedEmbedding(nn.Module):
    """An embedding whose next rows can be replaced."""

    placing: "Placing"

    def forward(self, input: Tensor) -> Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
        rows: Tensor = super().forward(input)
        self.placing.place(rows.view(-1, rows.shape[-1]))
        return rows


class Placing:
    """Turns the input embedding of `model`, which is exclusively ours, into one whose rows can be replaced.

    Attributes:
        handle: the kernels'; None: they do not place rows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._dtype, self._hidden_size = model.dtype, model.get_input_embeddings().weight.shape[1]
        self._next: tuple[Tensor, Tensor] | None = None
        embedding = model.get_input_embeddings()
        kind = type(embedding)
        embedding.__class__ = type(f"Placed{kind.__name__}", (_PlacedEmbedding, kind), {})
        embedding.placing = self
        has_kernel = model.device.type == "cpu" and kernels_available() and model.dtype != torch.float16
        self.handle: int | None = torch.ops.inflight.new_placing() if has_kernel else None
        if self.handle is not None:
            delete_with(self, torch.ops.inflight.delete_placing, self.handle)

    def fits(self, rows: Rows) -> bool:
        """Whether an item's rows are nothing but embeddings."""
        return rows.deep is None and rows.pooled.shape[1] == self._hidden_size

    def put(self, parts: Sequence[Part]) -> None:
        """Replace embeddings of the next forward pass."""
        rows = torch.cat([rows.pooled[which] for rows, which, _ in parts]).to(self._dtype)
        places = torch.cat([where for _, _, where in parts])
        if self.handle is None:
            self._next = rows, places
        else:
            torch.ops.inflight.put_rows(self.handle, rows, places)

    def place(self, embeddings: Tensor) -> None:
        """Replace rows of `[T, hidden]`, if there are any to replace."""
        if self.handle is not None:
            torch.ops.inflight.place_rows(embeddings, self.handle)
        elif self._next is not None:
            (rows, places), self._next = self._next, None
            embeddings[places.to(embeddings.device)] = rows
