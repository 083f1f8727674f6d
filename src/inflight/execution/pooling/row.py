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
from inflight.execution.pooling.step_prefixes import StepPrefixes
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

    def positions(self, input_ids: IntArray, lengths: IntArray, starts: IntArray) -> IntArray:
        """The position of each token, `[T]`, from token ids of texts end to end, how many are of each `[S]`, and how
        many come before them `[S]`: none, where the padding token counts."""
        if self.padding is None:
            return ragged_arange(lengths) + np.repeat(starts, lengths)
        counts = input_ids != self.padding
        so_far = np.cumsum(counts)
        before = np.concatenate([[0], so_far])[np.cumsum(lengths) - lengths]
        positions: IntArray = (so_far - np.repeat(before, lengths)) * counts + self.padding
        return positions


class Row:
    """Runs texts. Nothing is kept between steps.

    Args:
        model: a body that is ours alone, with "inflight" for its attention implementation.
        specs: its attention calls.
        num_blocks: of the cache; enough for the texts of any step.

    Attributes:
        executor: runs the row.
        shares_prefixes: whether what several texts of a step begin with is computed once.
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
        self.shares_prefixes = False
        self._counting, self._block_size, self._device = counting, backend.block_size, model.device
        self._padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        self._has_types = int(getattr(model.config, "type_vocab_size", None) or 1) > 1

    def run(self, texts: Sequence[PooledText]) -> list[torch.Tensor]:
        """The last hidden states `[L, H]` of each of several texts, which run in one row: of the L tokens that are not
        computed for another text."""
        batch = self._batch(texts)
        return list(self.executor.forward(batch).split(batch.query_lens_host.tolist()))  # type: ignore[no-untyped-call]

    @property
    def counts_from_zero(self) -> bool:
        """Whether a text's positions are those of its tokens."""
        return self._counting.padding is None

    def prefixes(self) -> StepPrefixes:
        """Where the texts of a step will lie."""
        return StepPrefixes(self._block_size, are_shared=self.shares_prefixes, padding=self._padding)

    def _batch(self, texts: Sequence[PooledText]) -> RaggedBatch:
        """All texts to their ends. The cache lasts for one attention call, so every step has all blocks."""
        spans, tables, prefixes = [], [], self.prefixes()
        for number, text in enumerate(texts):
            start, blocks = prefixes.place(text)
            length = len(text.token_ids)
            spans.append(Span(number, number, start, text.token_ids[start:], length - start, length))
            tables.append(array("i", blocks))
        batch = RaggedBatch.from_plan(StepPlan(tuple(spans), (tuple(tables),)), self._block_size, self._device)
        starts = batch.kv_lens_host - batch.query_lens_host
        positions = self._counting.positions(batch.logit_token_ids_host, batch.query_lens_host, starts)
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
