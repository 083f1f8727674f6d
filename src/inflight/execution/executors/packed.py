"""`PackedExecutor`: the ragged row through an unchanged `transformers` model, kept apart by attention alone."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.execution.attention import AttentionBackend, AttentionSpec, CpuCache
from inflight.execution.attention.interface import PagedCache
from inflight.execution.executors.compiled import Forward, compile_forward, plain_forward
from inflight.execution.executors.hook import attend_with, attention_sinks
from inflight.execution.executors.longrope import length_of_its_own, longrope_length
from inflight.execution.ragged_batch import RaggedBatch

logger = logging.getLogger(__name__)

MIN_ROWS = 4
"""On a CPU a single row takes another way through oneDNN, with other bits; and fewer than four are no faster."""


class PackedExecutor:
    """Runs a `RaggedBatch` as one batch row of T tokens; every attention call reads and writes its own paged cache.

    Args:
        model: ours alone, in evaluation mode, with "inflight" for its attention implementation.
        backend: of the model's device and dtype.
        specs: the attention calls of one forward pass in order, as found by `find_attention_calls`.
    """

    name = "packed"
    can_share_prefixes = True
    bytes_per_slot = 0

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend, specs: Sequence[AttentionSpec]) -> None:
        self.model = model
        self.backend = backend
        self.specs = tuple(specs)
        self._on_cpu = model.device.type == "cpu"
        self._longrope_length = longrope_length(model.config.get_text_config())
        takes_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._forward = plain_forward(model, takes_logit_rows=takes_logit_rows)
        self._compiled: Forward | None = None
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
        if len(modules) != len(caches):
            return "a module attends more than once in a forward pass"
        if self._longrope_length is not None:
            return "its position embeddings depend on each sequence's length (LongRoPE)"
        try:
            self.backend.begin_step(RaggedBatch.empty(self.model.device))
            self._compiled = compile_forward(self.model, self._forward, modules, caches, mode)
        except Exception as error:
            logger.debug("torch.compile failed", exc_info=True)
            return f"torch.compile can not take it in one piece: {str(error).strip().splitlines()[0]}"
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
        self.backend.write(cache, key, value, spec)
        output = self.backend.attend(query, cache, spec, attention_sinks(module, kwargs))
        if num_rows > num_tokens:
            output = torch.cat([output, output.new_zeros(num_rows - num_tokens, *output.shape[1:])])
        return output[None]


def _enough(rows: torch.Tensor) -> torch.Tensor:
    """Rows, repeated up to `MIN_ROWS`; none as zeros."""
    if rows.shape[0] >= MIN_ROWS:
        return rows
    with torch.inference_mode(False):  # a compiled model takes tensors of one kind
        last = rows[-1:] if rows.shape[0] else rows.new_zeros(1)
        return torch.cat([rows, last.repeat(MIN_ROWS - rows.shape[0])])
