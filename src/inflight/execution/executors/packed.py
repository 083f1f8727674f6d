"""`PackedExecutor`: the ragged row through an unchanged `transformers` model, kept apart by attention alone."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.attention.interface import PagedCache
from inflight.execution.executors.hook import attend_with
from inflight.execution.executors.longrope import length_of_its_own, longrope_length
from inflight.execution.ragged_batch import RaggedBatch


class PackedExecutor:
    """Runs a `RaggedBatch` as one batch row of T tokens; every attention call reads and writes its own paged cache.

    Args:
        model: ours alone, in evaluation mode, with "inflight" for its attention implementation.
        backend: of the model's device and dtype.
        specs: the attention calls of one forward pass in order, as found by `find_attention_calls`.
    """

    name = "packed"

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend, specs: Sequence[AttentionSpec]) -> None:
        self.model = model
        self.backend = backend
        self.specs = tuple(specs)
        self._longrope_length = longrope_length(model.config.get_text_config())
        self._takes_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._caches: list[PagedCache] = []
        self._num_calls = 0

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`."""
        return block_size * sum(spec.bytes_per_token(self.model.dtype) for spec in self.specs)

    def allocate(self, num_blocks: int) -> None:
        """See `Executor`."""
        self._caches = [self.backend.allocate(num_blocks, spec) for spec in self.specs]

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """See `Executor`."""
        self.backend.begin_step(batch)
        if copies:
            for cache in self._caches:
                self.backend.copy_blocks(cache, copies)
        options = {"logits_to_keep": batch.logit_rows} if self._takes_logit_rows else {}
        self._num_calls = 0
        with attend_with(self._attend), length_of_its_own(self.model, batch, self._longrope_length):
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
                **options,
            ).logits[0]
        if self._num_calls != len(self.specs):
            raise RuntimeError(f"the model made {self._num_calls} attention calls, not {len(self.specs)} as at load")
        if not self._takes_logit_rows:
            return logits[batch.logit_rows]
        if logits.shape[0] != batch.num_logit_rows:
            raise RuntimeError(
                f"the model gave {logits.shape[0]} rows of logits where {batch.num_logit_rows} were asked"
            )
        return logits

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The attention call whose turn it is: its cache is found by its ordinal in the forward pass, because a layer
        may attend twice (DiffLlama) or run twice (HRM)."""
        spec, cache = self.specs[self._num_calls], self._caches[self._num_calls]
        self._num_calls += 1
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        self.backend.write(cache, key, value, spec)
        return self.backend.attend(query, cache, spec, attention_sinks(module, kwargs))[None]


def attention_sinks(module: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The per-head logits `[H]` that join this call's softmax, if it has any."""
    sinks = kwargs.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, torch.Tensor) else None
