"""`ModelCall`: how a model is called with a cache: not all take everything, and not by the same names."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.execution.ragged_batch import to_device

CACHE_NAMES = ("past_key_values", "cache_params", "state", "mems")
"""What models call their cache."""


class ModelCall:
    """One model's way of being called.

    Args:
        uses_cache: whether the model is to keep anything.

    Attributes:
        no_logits: `[0, V]`.
    """

    def __init__(self, model: PreTrainedModel, *, uses_cache: bool = True) -> None:
        self.model = model
        self.uses_cache = uses_cache
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in CACHE_NAMES if name in parameters), None)
        self._takes_positions = "position_ids" in parameters
        self._takes_mask = "attention_mask" in parameters
        self._takes_logit_rows = "logits_to_keep" in parameters
        self.no_logits = torch.empty((0, self.vocab_size), dtype=model.dtype, device=model.device)

    def __call__(self, token_ids: Any, positions: Any, mask: Any, cache: Any, num_logit_rows: int) -> torch.Tensor:
        """Logits `[G, num_logit_rows, V]` of the last of tokens `[G, L]` at positions `[G, L]`; mask `[G, K]`, None:
        nothing is hidden."""
        logits: torch.Tensor = self.outputs(token_ids, positions, mask, cache, max(1, num_logit_rows)).logits
        return logits[:, logits.shape[1] - num_logit_rows :]

    @staticmethod
    def cache_of(outputs: Any) -> Any:
        """The cache that the model has filled; None if it has none."""
        return next((each for name in CACHE_NAMES if (each := getattr(outputs, name, None)) is not None), None)

    def outputs(self, token_ids: Any, positions: Any, mask: Any, cache: Any, num_logit_rows: int) -> Any:
        """All that the model gives. Positions None: those that it thinks of itself."""
        device = self.model.device
        options: dict[str, Any] = {"use_cache": self.uses_cache, "return_dict": True}
        if positions is not None and self._takes_positions:
            options["position_ids"] = to_device(positions, device)
        if mask is not None and self._takes_mask:
            options["attention_mask"] = to_device(mask.astype(np.int64), device)
        if cache is not None and self.cache_name is not None:
            options[self.cache_name] = cache
        if self._takes_logit_rows:
            options["logits_to_keep"] = num_logit_rows
        return self.model(input_ids=to_device(np.array(token_ids, dtype=np.int64), device), **options)
