"""`RaggedBatch`: a step's spans laid end to end in one unpadded row, as the tensors that a forward pass needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from inflight.contracts.step.plan import BlockTable, Span, StepPlan

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheGroupBatch:
    """One cache group's part of a step.

    Attributes:
        cache_indices: `[T]` int64, where each token is written (see `cache_indices`); -1 writes nowhere.
        block_tables: `[S, max_blocks]` int32, rows padded with 0. In a group with a window, rows begin with `NO_BLOCK`:
            keys before the first that a span's first token sees must not be read.
        block_tables_host: the same in host memory.
    """

    cache_indices: torch.Tensor
    block_tables: torch.Tensor
    block_tables_host: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of S spans in one row, and its R logit rows.

    Attributes:
        plan: the step's plan.
        input_ids: `[T]` int64.
        positions: `[T]` int64, each token's position in its own sequence.
        logit_rows: `[R]` int64, indices into the row.
        groups: one per cache group.
        query_lens_host: `[S]` int64, tokens of each span.
        kv_lens_host: `[S]` int64, keys visible to each span, its own tokens included.
        sequence_lens_host: `[S]` int64, current length of each span's sequence.
        logit_slots_host, logit_positions_host, logit_token_ids_host: `[R]` int64, slot, position and id of the token of
            each logit row.
        logit_targets_host: `[R]` int64, the next token, where it is scored; -1 where one is sampled.
        items_host: `[S]` int64, whether a span's tokens are those of an image and see each other; None: none are.

    Fields ending in `_host` are in host memory: sizes are known without a device sync.
    """

    plan: StepPlan
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    groups: tuple[CacheGroupBatch, ...]
    query_lens_host: IntArray
    kv_lens_host: IntArray
    sequence_lens_host: IntArray
    logit_slots_host: IntArray
    logit_positions_host: IntArray
    logit_token_ids_host: IntArray
    logit_targets_host: IntArray
    items_host: IntArray | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """The S spans."""
        return self.plan.spans

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[0])

    @property
    def num_logit_rows(self) -> int:
        """R."""
        return int(self.logit_rows.shape[0])

    @classmethod
    def empty(cls, num_groups: int, device: torch.device) -> "RaggedBatch":
        """A step without spans, all padding."""
        none, host = torch.empty(0, dtype=torch.int64, device=device), np.empty(0, dtype=np.int64)
        table = np.empty((0, 1), dtype=np.int32)
        group = CacheGroupBatch(none, torch.from_numpy(table).to(device), table)
        return cls(StepPlan((), ()), none, none, none, (group,) * num_groups, *[host] * 7)

    @classmethod
    def from_plan(cls, plan: StepPlan, block_size: int, device: torch.device) -> "RaggedBatch":
        """Lay out a plan's spans, without reading from the device."""
        starts = np.array([span.start for span in plan.spans], dtype=np.int64)
        query_lens = np.array([len(span.token_ids) for span in plan.spans], dtype=np.int64)
        num_logit_rows = np.array([span.num_logit_rows for span in plan.spans], dtype=np.int64)
        slots = np.array([span.slot for span in plan.spans], dtype=np.int64)
        span_of_token = np.repeat(np.arange(len(plan.spans)), query_lens)
        positions = ragged_arange(query_lens) + starts[span_of_token]
        first_logit_rows = np.cumsum(query_lens) - num_logit_rows
        logit_rows = ragged_arange(num_logit_rows) + np.repeat(first_logit_rows, num_logit_rows)
        input_ids = np.concatenate([np.asarray(span.token_ids, dtype=np.int64) for span in plan.spans])
        return cls(
            plan=plan,
            input_ids=to_device(input_ids, device),
            positions=to_device(positions, device),
            logit_rows=to_device(logit_rows, device),
            groups=tuple(_group_batch(tables, span_of_token, positions, block_size, device) for tables in plan.tables),
            query_lens_host=query_lens,
            kv_lens_host=starts + query_lens,
            sequence_lens_host=np.array([span.sequence_length for span in plan.spans], dtype=np.int64),
            logit_slots_host=np.repeat(slots, num_logit_rows),
            logit_positions_host=positions[logit_rows],
            logit_token_ids_host=input_ids[logit_rows],
            logit_targets_host=_targets(plan.spans, num_logit_rows),
        )

    def with_items(self, items: Sequence[Sequence[tuple[int, int]]]) -> "RaggedBatch":
        """The same tokens, for attention: those of an item are a span of their own.

        Args:
            items: of each span's sequence, the ranges `[start, end)` of tokens that see each other.
        """
        parts: list[tuple[int, int, int, bool]] = []  # span, number of tokens, of keys, whether they are an item's
        for number, (span, ranges) in enumerate(zip(self.spans, items, strict=True)):
            within = {each for borders in ranges for each in borders if span.start < each < span.end}
            for start, end in pairwise(sorted({span.start, span.end} | within)):
                parts.append((number, end - start, end, any(first <= start < last for first, last in ranges)))
        if not any(is_item for *_, is_item in parts):
            return self
        numbers, query_lens, kv_lens, items_host = np.array(parts, dtype=np.int64).T.copy()
        groups = (
            replace(each, block_tables=each.block_tables[numbers], block_tables_host=each.block_tables_host[numbers])
            for each in self.groups
        )
        return replace(
            self, query_lens_host=query_lens, kv_lens_host=kv_lens, items_host=items_host, groups=tuple(groups)
        )


def cache_indices(
    block_tables: npt.NDArray[np.int32], rows: IntArray, positions: IntArray, block_size: int
) -> IntArray:
    """Cache indices (slot mapping) of tokens: `block * block_size + offset`, int64.

    Args:
        block_tables: `[S, max_blocks]` int32.
        rows: `[…]` int64 that broadcasts with `positions`, the table of each token.
        positions: `[…]` int64, each token's position in its own sequence.
        block_size: tokens of a block.
    """
    blocks = block_tables[rows, positions // block_size].astype(np.int64)
    indices: IntArray = blocks * block_size + positions % block_size
    return indices


def ragged_arange(lengths: IntArray) -> IntArray:
    """`[0 .. lengths[0]), [0 .. lengths[1]), …` end to end, for lengths `[S]`; all int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _targets(spans: Sequence[Span], num_logit_rows: IntArray) -> IntArray:
    """The target token of each logit row, `[R]`, from each span's number of rows `[S]`, both int64; -1 where one is
    sampled."""
    targets = np.full(num_logit_rows.sum(), -1, dtype=np.int64)
    if any(span.scored_ids for span in spans):
        for span, end in zip(spans, np.cumsum(num_logit_rows).tolist(), strict=True):
            first = end - span.num_logit_rows
            targets[first : first + len(span.scored_ids)] = span.scored_ids
    return targets


def _group_batch(
    tables: tuple[BlockTable, ...], span_of_token: IntArray, positions: IntArray, block_size: int, device: torch.device
) -> CacheGroupBatch:
    """One cache group's part, from the span `[T]` and position `[T]` of each token, int64."""
    block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    indices = cache_indices(block_tables, span_of_token, positions, block_size)
    return CacheGroupBatch(to_device(indices, device), to_device(block_tables, device), block_tables)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array `[…]` of any dtype as a tensor `[…]` on the device, without a device sync."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
