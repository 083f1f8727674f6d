"""`SequenceInputs`: what the steps of a sequence with images or sounds need besides its tokens."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.step.multimodal import Array, MultimodalInputs

PLACES = "placeholders"
TYPES = "token_type_ids"
"""The ending of the names of arguments with a type for each token."""


@dataclass(frozen=True, slots=True)
class SequenceInputs:
    """What the steps of one sequence need.

    Attributes:
        given: its images and sounds.
        positions: of the prompt's tokens, `[k, L]` int64.
        types: arguments of the model with a value for each token of the prompt, `[L]`.
    """

    given: MultimodalInputs
    positions: Tensor
    types: Mapping[str, Tensor]

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, prompt: Sequence[int], given: MultimodalInputs) -> "SequenceInputs":
        """Those of a prompt."""
        length = len(prompt)
        token_ids = torch.tensor([list(prompt)], device=model.device)
        arrays = {name: as_tensor(each) for name, each in given.arrays.items()}
        positions = model._prepare_position_ids_for_generation(token_ids, {"input_ids": token_ids, **arrays})
        forget_positions(model)
        positions = positions.reshape(-1, length)[-num_dimensions(model) :]  # a further first row is for masks
        names = {name for name in inspect.signature(model.forward).parameters if name.endswith(TYPES)}
        return cls(given, positions, {name: each[0] for name, each in arrays.items() if name in names})

    def positions_of(self, start: int, end: int) -> Tensor:
        """The positions `[k, end - start]` of these tokens. After the prompt each dimension counts on from its last, as
        in `model.generate`."""
        length = self.positions.shape[1]
        after = self.positions[:, -1:] + torch.arange(max(start, length), max(end, length)) - length + 1
        return torch.cat([self.positions[:, start:end], after], dim=1)

    def ranges(self, kind: str, start: int, end: int, num_times: int = 1) -> dict[str, list[tuple[int, int]]]:
        """The ranges of tokens that a model may take for an item of this kind, from `start`: neighbouring placeholders,
        or, by an argument that tells types of tokens, neighbours of the placeholders' type; of the tokens up to `end`,
        repeated `num_times`."""
        is_place = np.zeros(self.positions.shape[1], dtype=bool)
        for item in self.given.items:
            if item.kind == kind:
                is_place[list(item.places)] = True
        found = {name: (each == each[int(is_place.argmax())]).numpy() for name, each in self.types.items()}
        ranges = {}
        for name, is_item in {PLACES: is_place, **found}.items():
            row = np.tile(is_item[start:end], num_times)
            borders = np.flatnonzero(np.diff(row, prepend=False, append=False)).tolist()
            ranges[name] = list(zip(borders[::2], borders[1::2], strict=True))
        return ranges


def forget_positions(model: PreTrainedModel) -> None:
    """Make a model count the next prompt's positions from zero: those with M-RoPE keep the last prompt's offset."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None


def num_dimensions(model: PreTrainedModel) -> int:
    """The dimensions of positions: of M-RoPE, or 1."""
    sections = (getattr(module, "mrope_section", None) for module in model.modules())
    section = next((each for each in sections if each), ())
    return len(next(iter(section.values())) if isinstance(section, Mapping) else section) or 1


def as_argument(array: Array, dtype: torch.dtype) -> Any:
    """An argument of a model of this dtype."""
    tensor = as_tensor(array)
    return tensor.tolist() if array.is_list else tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_tensor(array: Array) -> Tensor:
    """A tensor of its own memory."""
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
