"""`ModelCall`: calls a model with a cache, adapting to its arguments and their names."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.ragged_batch import to_device

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names of the cache, as an argument and as an output; "cache" since `transformers` 5.24."""


def forward_parameters(model: PreTrainedModel) -> set[str]:
    """The names of a model's `forward` arguments. With `**kwargs`, these include those of its class's and base classes'
    `forward`; a proof checks whether they are accepted."""
    names: set[str] = set()
    for forward in (model.forward, *(vars(each)["forward"] for each in type(model).__mro__ if "forward" in vars(each))):
        parameters = inspect.signature(forward).parameters.values()
        names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind == each.VAR_KEYWORD for each in parameters):
            break
    return names


class ModelCall:
    """Calls one model.

    Args:
        uses_cache: whether to use a cache.

    Attributes:
        vocab_size: V, the rows of the input embedding.
        cache_name: the cache argument; None: none.
        no_logits: `[0, V]` in the model's dtype.
    """

    def __init__(self, model: PreTrainedModel, *, uses_cache: bool = True) -> None:
        self.model = model
        self.uses_cache = uses_cache
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        parameters = forward_parameters(model)
        self.cache_name = next((name for name in CACHE_NAMES if name in parameters), None)
        self._takes_positions = "position_ids" in parameters
        self._takes_mask = "attention_mask" in parameters
        self._takes_logit_rows = "logits_to_keep" in parameters
        self.no_logits = torch.empty((0, self.vocab_size), dtype=model.dtype, device=model.device)

    def __call__(self, token_ids: Any, positions: Any, mask: Any, cache: Any, num_logit_rows: int) -> torch.Tensor:
        """Logits `[B, num_logit_rows, V]`, in the model's dtype, of the last tokens of B rows.

        Args:
            token_ids, positions: `[B, L]` int64, on the host.
            mask: `[B, K]` bool, on the host, true for each of K keys that may be seen; None hides nothing.
            cache: the model's cache of earlier tokens, or None.
        """
        logits: torch.Tensor = self.outputs(token_ids, positions, mask, cache, max(1, num_logit_rows)).logits
        return logits[:, logits.shape[1] - num_logit_rows :]

    def cache_of(self, outputs: Any) -> Any:
        """The cache in a model's outputs; None: none. Raises `ModelError` if the model could not take it back."""
        if not self.uses_cache:
            return None
        cache = next((each for name in CACHE_NAMES if (each := getattr(outputs, name, None)) is not None), None)
        if cache is not None and self.cache_name is None:
            raise ModelError(
                f"{type(self.model).__name__} returns a cache, but its forward takes none under the name of "
                f"{', '.join(CACHE_NAMES)}"
            )
        return cache

    def outputs(self, token_ids: Any, positions: Any, mask: Any, cache: Any, num_logit_rows: int) -> Any:
        """All outputs of the model; the arguments are `__call__`'s. Without positions the model counts its own. A model
        that cannot return fewer logits returns those of all tokens."""
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
