"""`Row`: whole texts end to end in one row through an unchanged body, each with the positions that the body counts."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.contracts.plan import Span, StepPlan
from inflight.contracts.pooling import PooledText
from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.attention.grouping import BlockPart, Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.packed import MIN_ROWS
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.ragged_batch import IntArray, RaggedBatch, ragged_arange, to_device

TYPE_SHIFT = 20
"""A recorded forward pass takes token ids and positions. A token's type goes with its position, in the bits from here
on."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The positions that a model gives its tokens.

    Attributes:
        padding: the padding token, from whose id on others are counted, and to which all padding tokens go (RoBERTa);
            None: positions are counted from 0.
    """

    padding: int | None = None

    @property
    def first(self) -> int:
        """The position of a text's first token."""
        return 0 if self.padding is None else self.padding + 1

    def positions(self, input_ids: IntArray, lengths: IntArray) -> IntArray:
        """The position of each token, `[T]`, from all texts' token ids end to end and their lengths `[S]`."""
        if self.padding is None:
            return ragged_arange(lengths)
        counts = input_ids != self.padding
        so_far = np.cumsum(counts)
        before = np.concatenate([[0], so_far])[np.cumsum(lengths) - lengths]
        positions: IntArray = (so_far - np.repeat(before, lengths)) * counts + self.padding
        return positions


class Row:
    """Runs whole texts. Nothing is kept between steps.

    Args:
        model: a body that is ours alone, with "inflight" for its attention implementation.
        specs: its attention calls.
        num_blocks: of the cache; enough for the texts of any step.

    Attributes:
        executor: runs the row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        specs: Sequence[AttentionSpec],
        counting: Counting,
        backend: AttentionBackend,
        num_blocks: int,
    ) -> None:
        self.executor = PackedExecutor(model, backend, _one_storage(specs), MIN_ROWS, _states_forward(model))
        self.executor.allocate(num_blocks)
        self._counting, self._block_size, self._device = counting, backend.block_size, model.device
        self._has_types = int(getattr(model.config, "type_vocab_size", None) or 1) > 1

    def run(self, texts: Sequence[PooledText]) -> list[torch.Tensor]:
        """The last hidden states `[L, H]` of each of several texts, which run in one row."""
        states = self.executor.forward(self._batch(texts))
        return list(states.split([len(text.token_ids) for text in texts]))  # type: ignore[no-untyped-call]

    def _batch(self, texts: Sequence[PooledText]) -> RaggedBatch:
        """All texts whole. The cache lasts for one attention call, so every step has all blocks."""
        spans, tables, first = [], [], 0
        for number, text in enumerate(texts):
            length = len(text.token_ids)
            spans.append(Span(number, number, 0, text.token_ids, length, length))
            num_blocks = -(-length // self._block_size)
            tables.append(array("i", range(first, first + num_blocks)))
            first += num_blocks
        batch = RaggedBatch.from_plan(StepPlan(tuple(spans), (tuple(tables),)), self._block_size, self._device)
        positions = self._counting.positions(batch.logit_token_ids_host, batch.query_lens_host)
        if self._has_types and any(text.token_types is not None for text in texts):
            types = [text.token_types or [0] * len(text.token_ids) for text in texts]
            positions = positions + (np.concatenate(types).astype(np.int64) << TYPE_SHIFT)
        groups = batch.groups * len(self.executor.cache_groups)
        return replace(batch, positions=to_device(positions, self._device), groups=groups)


def _one_storage(specs: Sequence[AttentionSpec]) -> Grouping:
    """All attention calls in the same memory, one after the other: a group for each, and all of them with the same
    blocks. Calls that read what an earlier one has kept, or differ in shape, have memory of their own."""
    shapes = {(spec.num_kv_heads, spec.head_size, spec.value_head_size) for spec in specs}
    if len(shapes) > 1 or any(spec.shares_cache_with is not None for spec in specs):
        return Grouping(tuple(specs))
    number = len(specs)
    own = tuple(replace(spec, cache_group=group) for group, spec in enumerate(specs))
    return Grouping(own, (ALL_TOKENS,) * number, tuple(BlockPart(group) for group in range(number)))


def _states_forward(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """A body's forward pass over one row: token ids `[T]`, positions with types `[T]` and rows `[R]` to the hidden
    states `[R, H]` of these rows."""
    has_types = getattr(model.config, "type_vocab_size", None) is not None  # GPT-2 takes some, and has none of its own
    takes_types = has_types and "token_type_ids" in forward_parameters(model)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options = {"token_type_ids": (positions >> TYPE_SHIFT)[None]} if takes_types else {}
        position_ids = (positions & ((1 << TYPE_SHIFT) - 1))[None]
        outputs = model(
            input_ids=input_ids[None], position_ids=position_ids, use_cache=False, return_dict=True, **options
        )
        states: torch.Tensor = outputs.last_hidden_state[0]
        return states[rows]

    return forward
