"""Attention over a paged cache: one interface, several backends. `reference` is the definition of all others."""

import torch

from inflight.execution.attention.interface import AttentionBackend, AttentionSpec
from inflight.execution.attention.reference import ReferenceAttention
from inflight.execution.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "AttentionSpec", "ReferenceAttention", "TorchAttention", "make_backend"]


def make_backend(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionBackend:
    """The backend of this name; "auto" is the best for the device."""
    if name == "reference":
        return ReferenceAttention(device, dtype, block_size)
    return TorchAttention(device, dtype, block_size)
