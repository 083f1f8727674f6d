"""`PackedExecutor`: the ragged row through an unchanged `transformers` model, kept apart by attention alone."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.attention import AttentionBackend, CpuCache
from inflight.execution.attention.grouping import BlockPart, Grouping
from inflight.execution.attention.interface import PagedCache
from inflight.execution.executors.compiled import Forward, compile_forward, plain_forward
from inflight.execution.hf.hook import attend_with, attention_sinks
from inflight.execution.hf.longrope import length_of_its_own, longrope_length
from inflight.execution.ragged_batch import CacheGroupBatch, RaggedBatch
from inflight.execution.weights.onednn import OneDnnLinear

logger = logging.getLogger(__name__)

MIN_ROWS = 4
"""On a CPU a single row takes another way through oneDNN, with other bits; and fewer than four are no faster."""


class PackedExecutor:
    """Runs a `RaggedBatch` as one batch row of T tokens; every attention call has a paged cache; calls of several
    groups lie in the same memory, in other blocks.

    Args:
        model: ours alone, in evaluation mode, with "inflight" for its attention implementation.
        backend: of the model's device and dtype.
        grouping: the attention calls of one forward pass in order, as found by `find_attention_calls`, and how they lie
            in the cache (`group_calls`).
    """

    name = "packed"
    can_share_prefixes = True
    bytes_per_slot = 0

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        grouping: Grouping,
    ) -> None:
        self.model = model
        self.backend = backend
        self.grouping = grouping
        self.specs = grouping.specs
        self.cache_groups = grouping.groups
        self._has_parts = any(part.num_parts > 1 for part in grouping.parts)
        self._on_cpu = model.device.type == "cpu"
        self._longrope_length = longrope_length(model.config.get_text_config())
        takes_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._forward = plain_forward(model, takes_logit_rows=takes_logit_rows)
        self._compiled: Forward | None = None
        self._caches: list[PagedCache] = []  # of each call
        self._storages: list[PagedCache] = []  # those of them that have memory of their own
        self._num_calls = self._num_tokens = 0  # of the running forward pass

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`."""
        return sum(self.backend.bytes_per_block(self.specs[calls[0]]) for calls in self.grouping.storages())

    def allocate(self, num_blocks: int) -> None:
        """See `Executor`."""

        def cache_of(call: int, beside: PagedCache | None) -> PagedCache:
            num_parts = (num_blocks + 1) * self.grouping.part_of(call).num_parts  # those of the last block are nobody's
            return self.backend.allocate(num_parts - 1, self.specs[call], beside)

        caches: dict[int, PagedCache] = {}
        self._storages.clear()
        for first, *others in self.grouping.storages():
            caches[first] = cache_of(first, None)
            caches |= {call: cache_of(call, caches[first]) for call in others}
            self._storages.append(caches[first])
        for call, spec in enumerate(self.specs):
            if spec.shares_cache_with is not None:
                caches[call] = cache_of(call, caches[spec.shares_cache_with])
        self._caches = [caches[call] for call in range(len(self.specs))]

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """See `Executor`."""
        if self._has_parts:
            groups = tuple(_in_part(batch, part, self.backend.block_size) for part in self.grouping.parts)
            batch = replace(batch, groups=groups)
        self.backend.begin_step(batch)
        if copies:
            for storage in self._storages:
                self.backend.copy_blocks(storage, copies)
        rows = batch.input_ids, batch.positions, batch.logit_rows
        if self._on_cpu:
            rows = _enough(rows[0]), _enough(rows[1]), _enough(rows[2])
        if self._compiled is not None:
            return self._compiled(*rows)[: batch.num_logit_rows]
        self._num_calls, self._num_tokens = 0, batch.num_tokens
        regime = length_of_its_own(self.model, batch, len(rows[0]), self._longrope_length)
        with attend_with(self._attend), regime:
            logits: torch.Tensor = self._forward(*rows)
        if self._num_calls != len(self.specs):
            raise RuntimeError(f"the model made {self._num_calls} attention calls, not {len(self.specs)} as at load")
        if len(logits) != len(rows[2]):
            raise RuntimeError(f"the model gave {len(logits)} rows of logits where {len(rows[2])} were asked")
        return logits[: batch.num_logit_rows]

    @torch.inference_mode()
    def compile(self, modules: Sequence[torch.nn.Module], mode: str) -> str | None:
        """Run the model through `torch.compile` from now on; the reason why not, if that can't be done.

        Args:
            modules: those that attend, in order.
            mode: "auto" or "max".
        """
        caches = [cache for cache in self._caches if isinstance(cache, CpuCache)]
        if not caches:
            return "it needs the attention backend 'cpu'"
        if any(isinstance(module, OneDnnLinear) for module in self.model.modules()):
            return "this CPU has no AVX-512 for its dtype, and torch.compile cannot take oneDNN's linear layers"
        if len(modules) != len(caches):
            return "a module attends more than once in a forward pass"
        if self._longrope_length is not None:
            return "its position embeddings depend on each sequence's length (LongRoPE)"
        try:
            self.backend.begin_step(RaggedBatch.empty(len(self.grouping.parts), self.model.device))
            self._compiled = compile_forward(self.model, self._forward, modules, caches, mode)
        except Exception as error:
            logger.debug("torch.compile failed", exc_info=True)
            return f"torch.compile cannot take it in one piece: {str(error).strip().splitlines()[0]}"
        return None

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
        if spec.shares_cache_with is None:
            self.backend.write(cache, key, value, spec)
        output = self.backend.attend(query, cache, spec, attention_sinks(module, kwargs))
        if num_rows > num_tokens:
            output = torch.cat([output, output.new_zeros(num_rows - num_tokens, *output.shape[1:])])
        return output[None]


def _in_part(batch: RaggedBatch, part: BlockPart, block_size: int) -> CacheGroupBatch:
    """Where the keys and values of calls lie that have a part of each block: parts are numbered like blocks."""
    group = batch.groups[part.group]
    if part.num_parts == 1:
        return group
    blocks, offsets = group.kv_slots // block_size, group.kv_slots % block_size
    return CacheGroupBatch(
        (blocks * part.num_parts + part.part) * block_size + offsets,
        group.block_tables * part.num_parts + part.part,
        group.block_tables_host * part.num_parts + part.part,
    )


def _enough(rows: torch.Tensor) -> torch.Tensor:
    """Rows, repeated up to `MIN_ROWS`; none as zeros."""
    if rows.shape[0] >= MIN_ROWS:
        return rows
    with torch.inference_mode(False):  # a compiled model takes tensors of one kind
        last = rows[-1:] if rows.shape[0] else rows.new_zeros(1)
        return torch.cat([rows, last.repeat(MIN_ROWS - rows.shape[0])])
