"""`ComparedAttention`: runs a backend beside the reference, and compares their outputs.

The reference keeps its own cache from the first step on, so the comparison depends neither on the backend's storage
layout nor on its correctness. Results are the backend's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.execution.attention.interface import AttentionBackend, AttentionSpec, KVStorage
from inflight.execution.attention.reference import ReferenceAttention
from inflight.execution.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class ComparedCache(KVStorage):
    """The backend's storage, and the reference's."""

    own: KVStorage
    shadow: KVStorage


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """One attention call of a step, and the largest difference of the outputs, relative to the reference's largest
    magnitude; infinite if an output is not finite."""

    spec: AttentionSpec
    difference: float


class ComparedAttention:
    """An `AttentionBackend` that runs `compared`, and `ReferenceAttention` beside it.

    Attributes:
        comparing: whether the reference attends, too. Writes always go to both caches.
        block_size: of both caches.
        num_parts: parts per block in a batch's first group (`BlockPart`).
        batch: the current or last step.
        copies: the blocks that were copied before it, (source, destination) each.
        calls: its attention calls in order; empty if they were not compared.
    """

    def __init__(self, compared: AttentionBackend, definition: ReferenceAttention, num_parts: int = 1) -> None:
        self.name = compared.name
        self.is_batch_invariant = compared.is_batch_invariant
        self.block_size = definition.block_size
        self.num_parts = num_parts
        self.comparing = False
        self.batch: RaggedBatch | None = None
        self.copies: Sequence[tuple[int, int]] = ()
        self.calls: list[ComparedCall] = []
        self._compared = compared
        self._definition = definition

    def bytes_per_block(self, spec: AttentionSpec) -> int:
        """See `AttentionBackend`. Bytes in both caches."""
        return self._compared.bytes_per_block(spec) + self._definition.bytes_per_block(spec)

    def allocate(self, num_blocks: int, spec: AttentionSpec, beside: KVStorage | None = None) -> ComparedCache:
        """See `AttentionBackend`. Takes the memory of two caches."""
        own_beside, shadow_beside = (None, None) if beside is None else _both(beside)
        own = self._compared.allocate(num_blocks, spec, own_beside)
        shadow = self._definition.allocate(num_blocks, spec, shadow_beside)
        return ComparedCache(own.keys, own.values, own, shadow)

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `AttentionBackend`."""
        self.batch, self.copies, self.calls = batch, (), []
        self._compared.begin_step(batch)
        self._definition.begin_step(batch)

    def write(self, cache: KVStorage, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        """See `AttentionBackend`."""
        own, shadow = _both(cache)
        self._compared.write(own, key, value, spec)
        self._definition.write(shadow, key, value, spec)

    def attend(
        self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `AttentionBackend`. Comparing waits for the device."""
        own, shadow = _both(cache)
        output = self._compared.attend(query, own, spec, sinks)
        if self.comparing:
            expected = self._definition.attend(query, shadow, spec, sinks)
            self.calls.append(ComparedCall(spec, _largest_difference(output, expected)))
        return output

    def copy_blocks(self, cache: KVStorage, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        own, shadow = _both(cache)
        self.copies = copies
        self._compared.copy_blocks(own, copies)
        self._definition.copy_blocks(shadow, copies)

    def memory_of(self, cache: KVStorage) -> list[torch.Tensor]:
        """See `AttentionBackend`."""
        return [
            each
            for storage, of in zip(_both(cache), (self._compared, self._definition), strict=True)
            for each in of.memory_of(storage)
        ]


def _both(cache: KVStorage) -> tuple[KVStorage, KVStorage]:
    assert isinstance(cache, ComparedCache), "the cache was allocated by another backend"
    return cache.own, cache.shadow


def _largest_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest magnitude in `expected`; both are `[T, H, Dv]`."""
    magnitude = expected.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    relative = (output.float() - expected.float()).abs().max() / magnitude
    return relative.nan_to_num(nan=float("inf"), posinf=float("inf")).item()
