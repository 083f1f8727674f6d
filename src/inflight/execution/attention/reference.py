"""`ReferenceAttention`: the definition, in plain torch, written for reading. It attends over the whole row with its
mask.

Every other backend is tested against it. It concatenates the keys of all spans, builds the block-diagonal mask over
them, and attends densely: `T x sum(kv_lens)` scores per head, for small steps only.
"""

from collections.abc import Sequence

import numpy as np
import torch

from inflight.execution.attention.interface import AttentionSpec, KVStorage
from inflight.execution.ragged_batch import RaggedBatch, cache_indices, ragged_arange


def may_attend(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None = None,
    chunk: int | None = None,
    *,
    is_causal: bool = True,
) -> torch.Tensor:
    """The keys of its own sequence that a query may see: `[..., L, K]` bool from positions `[..., L]` and `[..., K]`.

    If causal, a key must not come after the query; a window and a chunk restrict it further (see `AttentionSpec`).
    """
    queries, keys = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    distance = queries - keys
    allowed = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed &= distance.abs() < window
    if chunk is not None:
        allowed &= queries // chunk == keys // chunk
    return allowed


def ragged_mask(
    batch: RaggedBatch, window: int | None = None, chunk: int | None = None, *, is_causal: bool = True
) -> torch.Tensor:
    """The mask that keeps sequences apart: `[T, sum(kv_lens)]` bool, on the host.

    Rows are the tokens of the step, columns the keys of all spans end to end. It is block-diagonal: a query sees only
    keys of its own sequence.
    """
    query_lens, kv_lens = batch.query_lens_host, batch.kv_lens_host
    query_positions = torch.from_numpy(ragged_arange(query_lens) + np.repeat(kv_lens - query_lens, query_lens))
    key_positions = torch.from_numpy(ragged_arange(kv_lens))
    query_spans = torch.from_numpy(np.repeat(np.arange(len(query_lens)), query_lens))
    key_spans = torch.from_numpy(np.repeat(np.arange(len(kv_lens)), kv_lens))
    same_sequence = query_spans[:, None] == key_spans[None, :]
    return same_sequence & may_attend(query_positions, key_positions, window, chunk, is_causal=is_causal)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention written out, in float32: scores, softcap, mask, sinks, weights, sum.

    query `[..., H, L, Dk]`, key `[..., Hkv, K, Dk]`, value `[..., Hkv, K, Dv]`, allowed `[..., L, K]` (broadcast over
    heads), sinks `[H]`; returns `[..., H, L, Dv]` in the query's dtype.
    """
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    key = key.float().repeat_interleave(heads_per_kv_head, dim=-3)
    value = value.float().repeat_interleave(heads_per_kv_head, dim=-3)
    scores = query.float() @ key.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~allowed.unsqueeze(-3), float("-inf"))
    if sinks is not None:
        sink_column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    # 0 times NaN is NaN: a non-finite key must affect only queries that see it.
    is_broken = ~torch.isfinite(value).all(dim=-1)
    sees_broken = (allowed.unsqueeze(-3) & is_broken.unsqueeze(-2)).any(dim=-1, keepdim=True)
    attended = (weights @ value.masked_fill(is_broken.unsqueeze(-1), 0.0)).masked_fill(sees_broken, float("nan"))
    return attended.to(query.dtype)


class ReferenceAttention:
    """The definition as an `AttentionBackend`."""

    name = "reference"
    is_batch_invariant = False  # torch's operators dispatch on sizes

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self._batch: RaggedBatch | None = None

    @property
    def batch(self) -> RaggedBatch:
        """The running step."""
        assert self._batch is not None, "begin_step comes before the first call of a step"
        return self._batch

    def bytes_per_block(self, spec: AttentionSpec) -> int:
        """See `AttentionBackend`."""
        return self.block_size * spec.num_kv_heads * (spec.head_size + spec.value_head_size) * self.dtype.itemsize

    def allocate(self, num_blocks: int, spec: AttentionSpec, beside: KVStorage | None = None) -> KVStorage:
        """See `AttentionBackend`. Keys and values are `[num_blocks + 1, block_size, Hkv, D]`."""
        shape = (num_blocks + 1, self.block_size, spec.num_kv_heads)
        sizes = spec.head_size, spec.value_head_size
        if beside is not None:
            return KVStorage(beside.keys.view(*shape, sizes[0]), beside.values.view(*shape, sizes[1]))
        keys, values = (torch.empty(*shape, size, dtype=self.dtype, device=self.device) for size in sizes)
        keys[-1] = values[-1] = 0  # freed blocks are gathered from there, and masked
        return KVStorage(keys, values)

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        self._batch = batch

    def write(self, cache: KVStorage, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        """See `AttentionBackend`. Cache index -1 is the last one, in the block that belongs to no sequence."""
        indices = self.batch.groups[spec.cache_group].cache_indices
        cache.keys.flatten(0, 1)[indices] = key
        cache.values.flatten(0, 1)[indices] = value

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        allowed = ragged_mask(self.batch, spec.window, spec.chunk, is_causal=spec.is_causal).to(self.device)
        indices = self._cache_indices_of_all_keys(spec.cache_group)
        key = cache.keys.flatten(0, 1)[indices].transpose(0, 1)
        value = cache.values.flatten(0, 1)[indices].transpose(0, 1)
        return dense_attention(query.transpose(0, 1), key, value, allowed, spec, sinks).transpose(0, 1)

    def copy_blocks(self, cache: KVStorage, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        sources, destinations = torch.tensor(copies, device=self.device).T
        cache.keys[destinations] = cache.keys[sources]
        cache.values[destinations] = cache.values[sources]

    def memory_of(self, cache: KVStorage) -> list[torch.Tensor]:
        """See `AttentionBackend`."""
        return [cache.keys, cache.values]

    def _cache_indices_of_all_keys(self, cache_group: int) -> torch.Tensor:
        """The cache indices of the keys of all spans, end to end: `[sum(kv_lens)]` int64."""
        kv_lens, tables = self.batch.kv_lens_host, self.batch.groups[cache_group].block_tables_host
        spans, positions = np.repeat(np.arange(len(kv_lens)), kv_lens), ragged_arange(kv_lens)
        return torch.from_numpy(cache_indices(tables, spans, positions, self.block_size)).to(self.device)
