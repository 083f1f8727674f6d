"""Attention over a paged cache: one interface and several backends, with `reference` as the definition."""

import torch

from inflight.contracts.api.errors import ModelError
from inflight.execution.attention.cpu_backend import CpuAttention, CpuCache
from inflight.execution.attention.interface import AttentionBackend, AttentionSpec
from inflight.execution.attention.reference import ReferenceAttention
from inflight.execution.attention.torch_backend import TorchAttention
from inflight.execution.kernels import kernels_available

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "CpuAttention",
    "CpuCache",
    "ReferenceAttention",
    "TorchAttention",
    "make_backend",
]


def make_backend(
    name: str, device: torch.device, dtype: torch.dtype, block_size: int, kv_cache_dtype: str = "auto"
) -> AttentionBackend:
    """Return the backend of this name; "auto": the best for the device.

    Args:
        dtype: the model's.
        kv_cache_dtype: "auto" is the model's; "int8" and "int4" need the "cpu" backend.

    Raises:
        ModelError: the backend cannot run here, or not with this dtype.
    """
    runs_kernels = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    is_rounded = kv_cache_dtype != "auto"
    if is_rounded and name not in ("auto", "cpu"):
        raise ModelError(f"kv_cache_dtype {kv_cache_dtype!r} needs attention_backend 'cpu', not {name!r}")
    if name == "cpu" or is_rounded:
        asked = "attention_backend 'cpu'" if name == "cpu" else f"kv_cache_dtype {kv_cache_dtype!r}"
        if not runs_kernels:
            raise ModelError(f"{asked} is for float32 and bfloat16 models on a CPU, not {dtype} on {device}")
        if not kernels_available():
            raise ModelError(f"{asked} needs our CPU kernels, which could not be built here")
    if name == "reference":
        return ReferenceAttention(device, dtype, block_size)
    if name == "cpu" or (name == "auto" and runs_kernels and kernels_available()):
        return CpuAttention({"int8": torch.int8, "int4": torch.uint8}.get(kv_cache_dtype, dtype), block_size)
    return TorchAttention(device, dtype, block_size)
