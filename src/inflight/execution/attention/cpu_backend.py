"""`CpuAttention`: attention in C++, reading the cache's blocks in place (`execution/native/attend_tile.h` has the
arithmetic and the layout, `attention.cpp` who computes what).

A token's result has the same bits whatever runs beside it, however its prompt was chunked, wherever its blocks lie and
with any number of threads; what several sequences of a step share is read once for all of them.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.execution.attention.interface import AttentionSpec, PagedCache
from inflight.execution.ragged_batch import RaggedBatch

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CpuCache(PagedCache):
    """Keys and values in the kernel's layout, `[N + 1, Hkv, …]`; of int8 also the scales, a float for each token and
    head.

    Attributes:
        call: the number by which the kernel knows this attention call.
    """

    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    call: int


class CpuAttention:
    """The kernel's `AttentionBackend`. Needs `kernels_available()`.

    Args:
        dtype: of keys and values in the cache: float32, bfloat16 or int8. Queries may be float32 or bfloat16.
        block_size: any; one that is no multiple of 16 may waste what is missing to it.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype, block_size: int) -> None:
        if dtype not in STORED_DTYPES:
            raise ValueError(f"the cache can not be {dtype}; it can be float32, bfloat16 or int8")
        self.dtype = dtype
        self.block_size = block_size
        self._step = torch.ops.inflight.new_step()
        weakref.finalize(self, torch.ops.inflight.delete_step, self._step)

    def bytes_per_block(self, spec: AttentionSpec) -> int:
        """See `AttentionBackend`."""
        scale = 4 if self.dtype == torch.int8 else 0
        sizes = (self._key_size(spec), _whole_lanes(spec.value_head_size))
        return _whole_lanes(self.block_size) * spec.num_kv_heads * sum(n * self.dtype.itemsize + scale for n in sizes)

    def allocate(self, num_blocks: int, spec: AttentionSpec) -> CpuCache:
        """See `AttentionBackend`."""
        shape = (num_blocks + 1, spec.num_kv_heads, _whole_lanes(self.block_size))
        keys = torch.empty(*shape, self._key_size(spec), dtype=self.dtype)
        values = torch.empty(*shape, _whole_lanes(spec.value_head_size), dtype=self.dtype)
        key_scales, value_scales = (torch.empty(shape), torch.empty(shape)) if self.dtype == torch.int8 else (None,) * 2
        sizes = [spec.num_heads, spec.num_kv_heads, spec.head_size, spec.value_head_size]
        sizes += [spec.window or 0, spec.chunk or 0, self.block_size]
        softcap, group = spec.softcap or 0.0, spec.cache_group
        call = torch.ops.inflight.new_call(
            self._step, sizes, spec.scale, softcap, group, keys, values, key_scales, value_scales
        )
        cache = CpuCache(keys, values, key_scales, value_scales, call)
        weakref.finalize(cache, torch.ops.inflight.delete_call, call)
        return cache

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        torch.ops.inflight.begin_step(
            self._step,
            self.block_size,
            torch.from_numpy(batch.query_lens_host),
            torch.from_numpy(batch.kv_lens_host),
            [group.kv_slots for group in batch.groups],
            [group.block_tables for group in batch.groups],
        )

    def write(self, cache: PagedCache, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        torch.ops.inflight.write(key, value, cache.call)

    def attend(
        self, query: torch.Tensor, cache: PagedCache, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        out: torch.Tensor = torch.ops.inflight.attend(query, None if sinks is None else sinks.float(), cache.call)
        return out

    def copy_blocks(self, cache: PagedCache, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        assert isinstance(cache, CpuCache)
        sources, destinations = torch.tensor(copies).T
        for stored in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
            if stored is not None:
                stored[destinations] = stored[sources]

    def _key_size(self, spec: AttentionSpec) -> int:
        return spec.head_size + spec.head_size % 2 if self.dtype == torch.bfloat16 else spec.head_size


def _whole_lanes(size: int) -> int:
    """Rounded up to what a register of this CPU holds."""
    num_lanes: int = torch.ops.inflight.num_lanes()
    return -(-size // num_lanes) * num_lanes
