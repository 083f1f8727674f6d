"""`TorchAttention`: a good backend for any device, out of torch's own operators.

Spans are attended in groups of equal query length and similar context length (within a factor of two): the group's
blocks are gathered into one padded tensor and `scaled_dot_product_attention` runs over it, the query heads of a
key/value head folded into its rows so that keys and values are not repeated. So all decodes of a step take a few
calls; a long span is a group of its own, attended in slices of queries so that its mask stays small. Grouping and masks
are made once a step, not once a layer. Softcap and sinks, which torch's operator does not know, are written out.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from inflight.execution.attention.interface import AttentionSpec, KVStorage
from inflight.execution.attention.reference import ReferenceAttention, dense_attention, may_attend
from inflight.execution.ragged_batch import IntArray, RaggedBatch, to_device

MAX_GROUPED_QUERY_LEN = 16
"""Spans up to this long are grouped with others; longer ones fill the processor alone."""

MAX_QUERIES_AT_ONCE = 512
"""Longer spans are attended in slices of so many queries: the mask of a slice has this many rows."""


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """G spans (or one slice of one) of L queries each, over K gathered keys each (padded to the longest).

    Attributes:
        rows: `[G, L]` int64, the queries' places in the row.
        cache_indices: `[G, K]` int64, the keys' places in the cache. Padding repeats the span's own last key: whatever
            lies in memory that it does not own (a NaN of somebody else's, say) never enters its arithmetic.
        allowed: `[G, L, K]` bool; None when causality alone decides and K = L, a plain causal prefill.
    """

    rows: torch.Tensor
    cache_indices: torch.Tensor
    allowed: torch.Tensor | None


class TorchAttention(ReferenceAttention):
    """Attention by grouped gathers and `scaled_dot_product_attention`; storage as in the definition."""

    name = "torch"
    is_batch_invariant = False  # torch's operators choose by sizes

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        super().__init__(device, dtype, block_size)
        self._groups: dict[tuple[int, int | None, int | None, bool], list[SpanGroup]] = {}

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        super().begin_step(batch)
        self._groups.clear()

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        out = query.new_zeros(*query.shape[:-1], spec.value_head_size)
        for group in self._span_groups(spec):
            key = cache.keys.flatten(0, 1)[group.cache_indices].transpose(1, 2)
            value = cache.values.flatten(0, 1)[group.cache_indices].transpose(1, 2)
            out[group.rows] = self._attend_group(query[group.rows], key, value, group.allowed, spec, sinks)
        return out

    def _attend_group(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query `[G, L, H, Dk]`, key and value `[G, Hkv, K, D]`, allowed `[G, L, K]`; returns `[G, L, H, Dv]`."""
        num_spans, num_queries = query.shape[:2]
        if allowed is None:
            query = query.transpose(1, 2)
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads
            )
            return out.transpose(1, 2)
        if spec.softcap is not None or sinks is not None:
            return dense_attention(query.transpose(1, 2), key, value, allowed, spec, sinks).transpose(1, 2)
        fold = spec.num_heads // spec.num_kv_heads
        query = query.reshape(num_spans, num_queries, spec.num_kv_heads, fold, -1).permute(0, 2, 3, 1, 4)
        mask = allowed[:, None, None].expand(-1, -1, fold, -1, -1).flatten(2, 3)  # [G, 1, fold * L, K]
        out = functional.scaled_dot_product_attention(
            query.flatten(2, 3), key, value, attn_mask=mask, scale=spec.scale
        )  # [G, Hkv, fold * L, Dv]
        out = out.reshape(num_spans, spec.num_kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(num_spans, num_queries, spec.num_heads, -1)

    # ------------------------------------------------------------------------------------ once a step

    def _span_groups(self, spec: AttentionSpec) -> list[SpanGroup]:
        """The step's spans in groups, as calls of this kind see them; made at the first such call."""
        key = (spec.cache_group, spec.window, spec.chunk, _is_plain(spec))
        if key not in self._groups:
            self._groups[key] = self._make_groups(spec)
        return self._groups[key]

    def _make_groups(self, spec: AttentionSpec) -> list[SpanGroup]:
        query_lens, kv_lens = self.batch.query_lens_host, self.batch.kv_lens_host
        starts = kv_lens - query_lens
        visible = kv_lens - _first_visible_keys(starts, spec)
        by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
        for span, (query_len, num_keys) in enumerate(zip(query_lens.tolist(), visible.tolist(), strict=True)):
            grouped = query_len <= MAX_GROUPED_QUERY_LEN
            by_size[(query_len, num_keys.bit_length()) if grouped else (-1, span)].append(span)
        groups = []
        for members in by_size.values():
            spans = np.array(members)
            query_len = int(query_lens[spans[0]])
            if _is_plain(spec) and len(spans) == 1 and starts[spans[0]] == 0:
                groups.append(self._make_group(spans, 0, query_len, spec, causal=True))
                continue
            for first in range(0, query_len, MAX_QUERIES_AT_ONCE):
                last = min(first + MAX_QUERIES_AT_ONCE, query_len)
                groups.append(self._make_group(spans, first, last, spec, causal=False))
        return groups

    def _make_group(self, spans: IntArray, first: int, last: int, spec: AttentionSpec, *, causal: bool) -> SpanGroup:
        """Queries `first` to `last` of each of `spans`; with `causal` the mask is left to torch's operator."""
        batch = self.batch
        query_lens, kv_lens = batch.query_lens_host[spans], batch.kv_lens_host[spans]
        row_starts = np.cumsum(batch.query_lens_host)[spans] - query_lens
        query_positions = (kv_lens - query_lens)[:, None] + np.arange(first, last)
        first_keys = _first_visible_keys(query_positions[:, 0], spec)
        num_keys = int((query_positions[:, -1] + 1 - first_keys).max())
        key_positions = first_keys[:, None] + np.arange(num_keys)
        own_positions = np.minimum(key_positions, kv_lens[:, None] - 1)
        tables = batch.groups[spec.cache_group].block_tables_host
        blocks = tables[spans[:, None], own_positions // self.block_size].astype(np.int64)
        allowed = None
        if not causal:  # padding stands at positions later than its span's last query, so causality hides it
            queries, keys = self._to_device(query_positions), self._to_device(key_positions)
            allowed = may_attend(queries, keys, spec.window, spec.chunk)
        return SpanGroup(
            rows=self._to_device(row_starts[:, None] + np.arange(first, last)),
            cache_indices=self._to_device(blocks * self.block_size + own_positions % self.block_size),
            allowed=allowed,
        )

    def _to_device(self, values: IntArray) -> torch.Tensor:
        return to_device(values, self.device)


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether causality is all there is to a call, so that torch's operator needs no mask for a whole prompt."""
    return spec.window is None and spec.chunk is None and spec.softcap is None and not spec.has_sinks


def _first_visible_keys(query_positions: IntArray, spec: AttentionSpec) -> IntArray:
    """The first key that a query at each of these positions, or any after it, may see."""
    first = np.zeros_like(query_positions)
    if spec.window is not None:
        first = np.maximum(first, query_positions - spec.window + 1)
    if spec.chunk is not None:
        first = np.maximum(first, query_positions // spec.chunk * spec.chunk)
    return first
