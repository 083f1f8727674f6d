"""A model's memory: an estimate before it is loaded, a measurement after.

An engine's memory is weights, KV cache and a constant (docs/guides/memory.md). A cache counts at its limit. A draft
model does not count.
"""

import os
from pathlib import Path

from inflight.contracts.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.gguf.parts import parts_of
from inflight.host.machine import usable_memory

PEAK_OF_LOADING = 1.6
"""The peak during a load, as a multiple of the weights."""

BYTES_OF_PROCESS = 2**29
"""Torch, Python and kernels."""

WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
"""File patterns of weights in a folder; the first match counts."""


def cache_limit(config: EngineConfig, num_engines: int) -> int | None:
    """The memory of one engine's cache in bytes. Unless set by an option, concurrent engines share a single one's
    default. None: it is set in blocks, whose size only the engine knows."""
    if config.kv_cache_memory is not None or config.num_blocks is not None:
        return config.kv_cache_memory
    return int(usable_memory() * CACHE_SHARE_OF_HOST / num_engines)


def bytes_before_load(model: str | os.PathLike[str], cache_bytes: int, num_engines: int = 1) -> int:
    """Estimate a model's peak memory during its load, and afterwards.

    Args:
        cache_bytes: the limit of one engine's cache.
    """
    return int(PEAK_OF_LOADING * weight_bytes(model)) + num_engines * (cache_bytes + BYTES_OF_PROCESS)


def bytes_when_loaded(info: ModelInfo, num_engines: int = 1) -> int:
    """The most memory of a loaded model."""
    num_blocks = info.num_blocks // max(1, len(info.cache_groups))
    cache_bytes = num_blocks * info.block_size * info.kv_bytes_per_token
    return sum(each.num_bytes for each in info.weights) + num_engines * (cache_bytes + BYTES_OF_PROCESS)


def weight_bytes(model: str | os.PathLike[str]) -> int:
    """The size of a model's weights in its folder or file; 0 if it is elsewhere."""
    path = Path(os.path.expanduser(model))
    if path.is_file():
        parts = [path.with_name(name) for name in parts_of(path.name)]
        return sum(part.stat().st_size for part in parts if part.is_file())
    if not path.is_dir():
        return 0
    for pattern in WEIGHTS:
        if files := list(path.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return 0
