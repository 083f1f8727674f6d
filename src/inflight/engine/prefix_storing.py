"""Opens an engine's prefix store: its folder and fingerprint."""

from collections.abc import Sequence
from pathlib import Path

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.model_info import ModelInfo
from inflight.execution.mapped_memory import populate
from inflight.execution.model_runner import ModelRunner
from inflight.prefix_store import BlockFolder, PrefixStore

SECONDS_TO_SAVE = 30.0
"""Seconds that an engine may spend saving blocks at its end."""


def open_prefix_store(config: EngineConfig, runner: ModelRunner) -> PrefixStore | None:
    """Open the configured store, if there is one.

    Raises:
        ModelError: the folder cannot be used, or the model keeps no blocks on a CPU.
    """
    if config.prefix_cache.folder is None:
        return None
    path = Path(config.prefix_cache.folder)
    fingerprint = runner.fingerprint()
    try:
        folder = BlockFolder(path, fingerprint, config.prefix_cache.size, _about(config, runner))
    except OSError as error:
        raise ModelError(f"prefix_cache_dir {str(path)!r} cannot be used: {error}") from error
    return PrefixStore(
        folder,
        runner.rows_of_block,
        SECONDS_TO_SAVE,
        num_blocks=runner.info.num_blocks,
        bytes_per_state=runner.info.state_bytes,
        touch=populate,
    )


def pin_prefix(
    store: PrefixStore, info: ModelInfo, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None
) -> None:
    """Let what is saved of a prompt stay. Raises `ValueError` if that is too much, `OSError` if it is impossible or
    not all of it is saved."""
    size = info.block_size
    firsts = [group.first_visible(len(token_ids) // size * size) // size for group in info.cache_groups]
    state_after = (len(token_ids) - 1) // size - 1 if info.num_states else None
    store.pin(token_ids, size, firsts, cache_salt, adapter, state_after=state_after)


def _about(config: EngineConfig, runner: ModelRunner) -> dict[str, object]:
    """A description, for people, of the engine that wrote the blocks."""
    info = runner.info
    return {
        "model": str(runner.model.config.name_or_path or info.model_class),
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": config.kv_cache.dtype,
        "block_size": info.block_size,
        "groups": len(info.cache_groups),
    }
