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

MIN_ROWS = 2
"""On a CPU a single row takes another way through oneDNN, with other bits: it is never run alone."""


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
        self._on_cpu = model.device.type == "cpu"
        self._longrope_length = longrope_length(model.config.get_text_config())
        self._takes_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._caches: list[PagedCache] = []
        self._num_calls = self._num_tokens = 0  # of the running forward pass

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`."""
        return sum(self.backend.bytes_per_block(spec) for spec in self.specs)

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
        input_ids, positions, logit_rows = batch.input_ids, batch.positions, batch.logit_rows
        if self._on_cpu:
            input_ids, positions, logit_rows = map(_at_least_two, (input_ids, positions, logit_rows))
        options = {"logits_to_keep": logit_rows} if self._takes_logit_rows else {}
        self._num_calls, self._num_tokens = 0, batch.num_tokens
        with attend_with(self._attend), length_of_its_own(self.model, batch, self._longrope_length):
            logits: torch.Tensor = self.model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
                **options,
            ).logits[0]
        if self._num_calls != len(self.specs):
            raise RuntimeError(f"the model made {self._num_calls} attention calls, not {len(self.specs)} as at load")
        if not self._takes_logit_rows:
            return logits[batch.logit_rows]
        if logits.shape[0] != len(logit_rows):
            raise RuntimeError(f"the model gave {logits.shape[0]} rows of logits where {len(logit_rows)} were asked")
        return logits[: batch.num_logit_rows]

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
        num_rows, num_tokens = query.shape[2], self._num_tokens
        query, key, value = (states[0].transpose(0, 1)[:num_tokens] for states in (query, key, value))
        self.backend.write(cache, key, value, spec)
        output = self.backend.attend(query, cache, spec, attention_sinks(module, kwargs))
        if num_rows > num_tokens:
            output = torch.cat([output, output.new_zeros(num_rows - num_tokens, *output.shape[1:])])
        return output[None]


def _at_least_two(rows: torch.Tensor) -> torch.Tensor:
    """A single row twice; any other number as it is."""
    return rows.expand(MIN_ROWS) if rows.shape[0] == 1 else rows


def attention_sinks(module: torch.nn.Module, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The per-head logits `[H]` that join this call's softmax, if it has any."""
    sinks = kwargs.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, torch.Tensor) else None
