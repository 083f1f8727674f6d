"""The interface of attention backends, and `AttentionSpec`, the description of an attention call.

Shapes: T tokens in the row, H query heads, Hkv key/value heads, Dk and Dv head sizes of keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from inflight.execution.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention call of a model's forward pass, found by preparation.

    Attributes:
        num_heads, num_kv_heads: H and Hkv; query heads `i * H // Hkv ...` share key/value head i.
        head_size, value_head_size: Dk and Dv.
        scale: factor of the products of queries and keys.
        is_causal: whether a query sees no key that comes after it. If not, it sees all keys of its span's sequence, so
            a sequence that is to see all of itself runs in one step.
        window: a query at position i sees keys j with `|i - j| < window`; None sees all that it may.
        chunk: a query sees only keys in its own aligned chunk of this many positions (Llama 4); None: no chunks.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2); None: they stay.
        has_sinks: a per-head logit joins each softmax and is dropped from the result (GPT-OSS).
        cache_group: index of its cache group.
        shares_cache_with: ordinal of the earlier call whose keys and values this call reuses (Gemma 3n and 4); None: it
            has its own.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    is_causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    cache_group: int = 0
    shares_cache_with: int | None = None


@dataclass(frozen=True, slots=True)
class KVStorage:
    """Storage for the keys and values of one attention call: one block more than the cache has, then dimensions of the
    backend's choice.

    The definition's are `[num_blocks + 1, block_size, Hkv, Dk]` and `[num_blocks + 1, block_size, Hkv, Dv]`, in the
    model's dtype. The last block belongs to no sequence: writes to cache index -1 may go there.
    """

    keys: torch.Tensor
    values: torch.Tensor


class AttentionBackend(Protocol):
    """Stores keys and values in blocks, and lets each query attend to those of its own sequence.

    In every layer all writes of a step finish before any read.

    Attributes:
        is_batch_invariant: whether a query's result has the same bits in any batch.
    """

    name: str
    is_batch_invariant: bool
    block_size: int

    def bytes_per_block(self, spec: AttentionSpec) -> int:
        """Bytes that a block takes in one attention call."""
        ...

    def allocate(self, num_blocks: int, spec: AttentionSpec, beside: KVStorage | None = None) -> KVStorage:
        """Allocate storage for one attention call. Memory is committed on first touch, where the system allows.

        Args:
            beside: the storage of another call, whose memory this one shares. The calls never use the same block. It
                has equal bytes of keys and of values, perhaps in fewer and larger blocks.
        """
        ...

    def begin_step(self, batch: RaggedBatch) -> None:
        """Prepare data shared by all attention calls of the step."""
        ...

    def write(self, cache: KVStorage, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        """Store the step's new keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]`, in the model's dtype, at the batch's
        `cache_indices`."""
        ...

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Each query `[T, H, Dk]`, in the model's dtype, over the keys that it may see; sinks `[H]`, float; returns
        `[T, H, Dv]` in the queries' dtype."""
        ...

    def copy_blocks(self, cache: KVStorage, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each."""
        ...

    def memory_of(self, cache: KVStorage) -> list[torch.Tensor]:
        """All that is stored, as tensors `[num_blocks + 1, …]` of any dtype."""
        ...
