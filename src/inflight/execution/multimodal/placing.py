"""`Placing`: writes encoder outputs into the input embeddings, in the kernels, so that a graph can run the step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.multimodal.encoder import Part, Rows


class _PlacedEmbedding(nn.Module):
    """An embedding whose rows can be replaced."""

    placing: int

    def forward(self, input: Tensor) -> Tensor:
        """Token ids `[…]` int64 to `[…, hidden]`."""
        rows: Tensor = super().forward(input)
        torch.ops.inflight.place_rows(rows.view(-1, rows.shape[-1]), self.placing)
        return rows


class Placing:
    """Turns the input embedding of `model`, which is exclusively ours, into one whose rows can be replaced.

    Attributes:
        handle: the kernels'; None: there are no kernels, and no rows can be placed.
    """

    handle: int | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._dtype, self._hidden_size = model.dtype, model.get_input_embeddings().weight.shape[1]
        if model.device.type != "cpu" or not kernels_available() or model.dtype not in (torch.float32, torch.bfloat16):
            return
        embedding = model.get_input_embeddings()
        kind = type(embedding)
        embedding.__class__ = type(f"Placed{kind.__name__}", (_PlacedEmbedding, kind), {})
        self.handle = torch.ops.inflight.new_placing()
        embedding.placing = self.handle
        delete_with(embedding, torch.ops.inflight.delete_placing, self.handle)

    def fits(self, rows: Rows) -> bool:
        """Whether an item's rows can be placed."""
        return self.handle is not None and rows.deep is None and rows.pooled.shape[1] == self._hidden_size

    def put(self, parts: Sequence[Part]) -> None:
        """Replace embeddings of the next forward pass."""
        rows = torch.cat([rows.pooled[which] for rows, which, _ in parts]).to(self._dtype)
        torch.ops.inflight.put_rows(self.handle, rows, torch.cat([where for _, _, where in parts]))
