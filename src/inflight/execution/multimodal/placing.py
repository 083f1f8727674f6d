"""`Placing`: puts encoder outputs in place of input embeddings, and adds them to hidden states (DeepStack); on a CPU in
the kernels, so that a graph has it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.multimodal.encoder import Part, Rows, num_deep_layers


class _PlacedInput(nn.Module):
    """A language model whose next input embeddings change in some rows, after what a model does with them itself."""

    placing: "Placing"

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        """As the module, with these rows."""
        if inputs_embeds is not None:
            self.placing.place(inputs_embeds.view(-1, inputs_embeds.shape[-1]), 0)
        return super().forward(*args, inputs_embeds=inputs_embeds, **kwargs)


class _Placed(nn.Module):
    """A module whose next output changes in some rows."""

    placing: "Placing"
    layer: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module, with these rows."""
        output = super().forward(*args, **kwargs)
        states = output if isinstance(output, Tensor) else output[0]
        self.placing.place(states.view(-1, states.shape[-1]), self.layer)
        return output


class Placing:
    """Hooks the language model and the first layers of `model`, which is exclusively ours.

    Attributes:
        handles: the kernels', by layer: 0 for input embeddings, k for the k-th layer's output; empty: without kernels.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._next: dict[int, tuple[Tensor, Tensor]] = {}  # rows and places, by layer
        self.handles: list[int] = []
        self._num_deep = number = num_deep_layers(model)
        decoder, embedding = model.get_decoder(), model.get_input_embeddings()
        modules = [embedding if decoder in (None, model, model.base_model) else decoder]
        modules += decoder.layers[:number] if number else ()
        self._nothing = torch.empty(0, embedding.weight.shape[1], dtype=model.dtype), torch.empty(0, dtype=torch.int64)
        has_kernel = model.device.type == "cpu" and kernels_available() and model.dtype != torch.float16
        for layer, module in enumerate(modules):
            kind = type(module)
            hook = _PlacedInput if module is decoder else _Placed
            module.__class__ = type(f"Placed{kind.__name__}", (hook, kind), {})
            module.placing, module.layer = self, layer
            if has_kernel:
                self.handles.append(torch.ops.inflight.new_placing())
                delete_with(self, torch.ops.inflight.delete_placing, self.handles[-1])

    def put(self, parts: Sequence[Part]) -> None:
        """Change the states of the next forward pass. Only rows that `fits` allows."""
        before, self._next = self._next, {}
        for layer in {layer for rows, _, _ in parts for layer in rows}:
            of_layer = [(rows[layer][which], where) for rows, which, where in parts if layer in rows]
            rows, places = map(torch.cat, zip(*of_layer, strict=True))
            self._next[layer] = rows.to(self._nothing[0].dtype), places
        if self.handles:
            for layer in self._next | before:
                given = self._next.get(layer, self._nothing)
                torch.ops.inflight.put_rows(self.handles[layer], *given, layer > 0)

    def fits(self, rows: Rows) -> bool:
        """Whether there is a hook for each of an item's rows."""
        sizes = {each.shape[1] for each in rows.values()}
        return sizes == {self._nothing[0].shape[1]} and max(rows) <= self._num_deep

    def place(self, states: Tensor, layer: int) -> None:
        """Change the output `[T, hidden]` of a layer."""
        if self.handles:
            torch.ops.inflight.place_rows(states, self.handles[layer])
        elif layer in self._next:
            rows, places = self._next.pop(layer)
            places = places.to(states.device)
            states[places] = rows if layer == 0 else states[places] + rows
