"""`TorchAttention`: a backend for any device, with torch's own operators.

Spans of equal query length and similar context length (within a factor of two) attend together: their blocks are
gathered into one padded tensor, and `scaled_dot_product_attention` runs over it. The query heads of a key/value head
are folded into its rows, so that keys and values are not repeated. So all decodes of a step take a few calls. A long
span attends alone, in slices of queries, so that its mask stays small. Gathers and masks are made once a step, not once
a layer. Softcap and sinks, which torch's operator lacks, are written out.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from inflight.execution.attention.interface import AttentionSpec, KVStorage
from inflight.execution.attention.reference import ReferenceAttention, dense_attention, may_attend
from inflight.execution.ragged_batch import IntArray, RaggedBatch, cache_indices, to_device

MAX_SHARED_QUERY_LEN = 16
"""Spans up to this length attend together; longer ones use the processor fully alone."""

MAX_QUERIES_AT_ONCE = 512
"""Longer spans attend in slices of this many queries, the rows of a slice's mask."""


@dataclass(frozen=True, slots=True)
class Gather:
    """B spans (or one slice of one) of L queries each, over K gathered keys each (padded to the longest).

    Attributes:
        rows: `[B, L]` int64, the queries' indices in the row.
        cache_indices: `[B, K]` int64, where the keys lie. Padding repeats the span's own last key, so that no other
            memory (another sequence's NaN, say) enters its arithmetic.
        allowed: `[B, L, K]` bool; None when causality alone decides and K = L, a plain causal prefill.
    """

    rows: torch.Tensor
    cache_indices: torch.Tensor
    allowed: torch.Tensor | None


class TorchAttention(ReferenceAttention):
    """Attention by gathers and `scaled_dot_product_attention`; storage as in the definition."""

    name = "torch"
    is_batch_invariant = False  # torch's operators dispatch on sizes

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        super().__init__(device, dtype, block_size)
        self._gathers: dict[tuple[int, int | None, int | None, bool, bool], list[Gather]] = {}

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        super().begin_step(batch)
        self._gathers.clear()

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        out = query.new_zeros(*query.shape[:-1], spec.value_head_size)
        for gather in self._gathers_for(spec):
            key = cache.keys.flatten(0, 1)[gather.cache_indices].transpose(1, 2)
            value = cache.values.flatten(0, 1)[gather.cache_indices].transpose(1, 2)
            out[gather.rows] = self._attend_together(query[gather.rows], key, value, gather.allowed, spec, sinks)
        return out

    def _attend_together(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query `[B, L, H, Dk]`, key and value `[B, Hkv, K, D]`, allowed `[B, L, K]` bool, sinks `[H]`; returns
        `[B, L, H, Dv]` in the query's dtype."""
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
        mask = allowed[:, None, None].expand(-1, -1, fold, -1, -1).flatten(2, 3)  # [B, 1, fold * L, K]
        out = functional.scaled_dot_product_attention(
            query.flatten(2, 3), key, value, attn_mask=mask, scale=spec.scale
        )  # [B, Hkv, fold * L, Dv]
        out = out.reshape(num_spans, spec.num_kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(num_spans, num_queries, spec.num_heads, -1)

    # ------------------------------------------------------------------------------------ once a step

    def _gathers_for(self, spec: AttentionSpec) -> list[Gather]:
        """The step's gathers for attention calls of this kind; made at the first such call."""
        kind = (spec.cache_group, spec.window, spec.chunk, spec.is_causal, _is_plain(spec))
        if kind not in self._gathers:
            self._gathers[kind] = self._make_gathers(spec)
        return self._gathers[kind]

    def _make_gathers(self, spec: AttentionSpec) -> list[Gather]:
        query_lens, kv_lens = self.batch.query_lens_host, self.batch.kv_lens_host
        starts = kv_lens - query_lens
        visible = kv_lens - _first_visible_keys(starts, spec)
        by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
        for span, (query_len, num_keys) in enumerate(zip(query_lens.tolist(), visible.tolist(), strict=True)):
            shares = query_len <= MAX_SHARED_QUERY_LEN
            by_size[(query_len, num_keys.bit_length()) if shares else (-1, span)].append(span)
        gathers = []
        for members in by_size.values():
            spans = np.array(members)
            query_len = int(query_lens[spans[0]])
            if _is_plain(spec) and len(spans) == 1 and starts[spans[0]] == 0:
                gathers.append(self._make_gather(spans, 0, query_len, spec, causal=True))
                continue
            for first in range(0, query_len, MAX_QUERIES_AT_ONCE):
                last = min(first + MAX_QUERIES_AT_ONCE, query_len)
                gathers.append(self._make_gather(spans, first, last, spec, causal=False))
        return gathers

    def _make_gather(self, spans: IntArray, first: int, last: int, spec: AttentionSpec, *, causal: bool) -> Gather:
        """Queries `first` to `last` of each of `spans` `[B]`; with `causal`, torch's operator makes the mask."""
        batch = self.batch
        query_lens, kv_lens = batch.query_lens_host[spans], batch.kv_lens_host[spans]
        row_starts = np.cumsum(batch.query_lens_host)[spans] - query_lens
        query_positions = (kv_lens - query_lens)[:, None] + np.arange(first, last)
        first_keys = _first_visible_keys(query_positions[:, 0], spec)
        num_keys = int((_end_of_visible_keys(query_positions[:, -1], kv_lens, spec) - first_keys).max())
        key_positions = first_keys[:, None] + np.arange(num_keys)
        own_positions = np.minimum(key_positions, kv_lens[:, None] - 1)
        tables = batch.groups[spec.cache_group].block_tables_host
        allowed = None
        if not causal:
            queries, keys = self._to_device(query_positions), self._to_device(key_positions)
            allowed = may_attend(queries, keys, spec.window, spec.chunk, is_causal=spec.is_causal)
            if not spec.is_causal:  # else causality hides padding, which lies after a span's last query
                allowed &= keys[:, None] < self._to_device(kv_lens)[:, None, None]
        return Gather(
            rows=self._to_device(row_starts[:, None] + np.arange(first, last)),
            cache_indices=self._to_device(cache_indices(tables, spans[:, None], own_positions, self.block_size)),
            allowed=allowed,
        )

    def _to_device(self, values: IntArray) -> torch.Tensor:
        """An array `[…]` int64 on the device."""
        return to_device(values, self.device)


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether causality alone decides what a query sees, so that a whole prompt needs no mask."""
    return spec.is_causal and spec.window is spec.chunk is spec.softcap is None and not spec.has_sinks


def _first_visible_keys(query_positions: IntArray, spec: AttentionSpec) -> IntArray:
    """The first key that a query at each of these positions `[n]` int64, or at any later one, may see: `[n]` int64."""
    first = np.zeros_like(query_positions)
    if spec.window is not None:
        first = np.maximum(first, query_positions - spec.window + 1)
    if spec.chunk is not None:
        first = np.maximum(first, query_positions // spec.chunk * spec.chunk)
    return first


def _end_of_visible_keys(query_positions: IntArray, kv_lens: IntArray, spec: AttentionSpec) -> IntArray:
    """One more than the last of `kv_lens` `[n]` keys that a query at each of these positions `[n]` may see: `[n]`, all
    int64."""
    if spec.is_causal:
        return query_positions + 1
    end = kv_lens
    if spec.window is not None:
        end = np.minimum(end, query_positions + spec.window)
    if spec.chunk is not None:
        end = np.minimum(end, (query_positions // spec.chunk + 1) * spec.chunk)
    return end
