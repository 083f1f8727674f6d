"""`CpuAttention`: attention in C++ that reads the cache's blocks in place.

`execution/kernels/attend_tile.h` has the arithmetic and the layout, `attention.cpp` the work partitioning. A token's
result has the same bits in any batch, chunking and block placement, and with any number of threads. Blocks shared by
sequences of a step are read once for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.execution.attention.interface import AttentionSpec, KVStorage
from inflight.execution.kernels import delete_with
from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.ragged_batch import RaggedBatch

BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8, torch.uint8: 4}
"""Of a number in a cache of this dtype: a byte has two of four bits."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CpuCache(KVStorage):
    """Keys and values in the kernel's layout, as views `[num_blocks + 1, Hkv, stripes, …]` of one piece of memory.

    Attributes:
        stored: the whole piece, `[num_blocks + 1, Hkv, stripes, bytes of a stripe]` int8.
        key_scales, value_scales: for a cache of eight or four bits, `[num_blocks + 1, Hkv, stripes, lanes]` float32,
            one for each token and head.
        call: the kernels' handle of this attention call.
    """

    stored: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    call: int


class CpuAttention:
    """The kernel's `AttentionBackend`. Needs `kernels_available()`.

    Args:
        dtype: of keys and values in the cache: float32, bfloat16, int8, or uint8 (two numbers of four bits in a byte).
            Queries may be float32 or bfloat16.
        block_size: any; it is rounded up to a multiple of 16 in memory.

    Raises:
        ValueError: the cache cannot have this dtype.
    """

    name = "cpu"
    is_batch_invariant = True

    def __init__(self, dtype: torch.dtype, block_size: int) -> None:
        if dtype not in BITS:
            raise ValueError(f"the cache cannot be {dtype}; it can be float32, bfloat16, int8 or uint8")
        self.dtype = dtype
        self.block_size = block_size
        self._step = torch.ops.inflight.new_step()
        delete_with(self, torch.ops.inflight.delete_step, self._step)

    def bytes_per_block(self, spec: AttentionSpec) -> int:
        """See `AttentionBackend`."""
        num_lanes: int = torch.ops.inflight.num_lanes()
        num_stripes = -(-self.block_size // num_lanes)
        return spec.num_kv_heads * num_stripes * sum(self._stripe_parts(spec))

    def allocate(self, num_blocks: int, spec: AttentionSpec, beside: KVStorage | None = None) -> CpuCache:
        """See `AttentionBackend`."""
        parts = self._stripe_parts(spec)
        if isinstance(beside, CpuCache):
            stored = beside.stored
        else:
            stored = untouched_memory((num_blocks + 1) * self.bytes_per_block(spec))
        stored = stored.view(num_blocks + 1, spec.num_kv_heads, -1, sum(parts))
        keys, values, *scales = torch.split(stored, parts, dim=-1)
        key_scales, value_scales = [each.view(torch.float32) for each in scales] or (None, None)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.head_size, spec.value_head_size]
        sizes += [spec.window or 0, spec.chunk or 0, self.block_size, int(spec.is_causal)]
        softcap, group = spec.softcap or 0.0, spec.cache_group
        call = torch.ops.inflight.new_call(self._step, sizes, spec.scale, softcap, group, stored, self.dtype)
        cache = CpuCache(keys.view(self.dtype), values.view(self.dtype), stored, key_scales, value_scales, call)
        delete_with(cache, torch.ops.inflight.delete_call, call)
        return cache

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        torch.ops.inflight.begin_step(
            self._step,
            self.block_size,
            torch.from_numpy(batch.query_lens_host),
            torch.from_numpy(batch.kv_lens_host),
            None if batch.items_host is None else torch.from_numpy(batch.items_host),
            [group.cache_indices for group in batch.groups],
            [group.block_tables for group in batch.groups],
        )

    def write(self, cache: KVStorage, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        torch.ops.inflight.write(key, value, cache.call)

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        sinks = None if sinks is None else sinks.float()
        out: torch.Tensor = torch.ops.inflight.attend(query, sinks, cache.call, spec.value_head_size)
        return out

    def copy_blocks(self, cache: KVStorage, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        sources, destinations = torch.tensor(copies).T
        cache.stored[destinations] = cache.stored[sources]

    def memory_of(self, cache: KVStorage) -> list[torch.Tensor]:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        return [cache.stored]

    def _stripe_parts(self, spec: AttentionSpec) -> list[int]:
        """Bytes of a stripe's keys and of its values; for eight and four bits also of the scales of each."""
        num_lanes: int = torch.ops.inflight.num_lanes()
        bits = BITS[self.dtype]
        key_size = spec.head_size + spec.head_size % 2 if bits < 32 else spec.head_size
        value_size = -(-spec.value_head_size // num_lanes) * num_lanes
        parts = [num_lanes * size * bits // 8 for size in (key_size, value_size)]
        return parts + [num_lanes * 4] * 2 if bits <= 8 else parts
