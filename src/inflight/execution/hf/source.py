"""`check_source`: whether there is a model of a name. A caller of the engine's process can ask without torch."""

import os
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError


def check_source(source: str | os.PathLike[str], config: EngineConfig) -> PreTrainedConfig:
    """The configuration of a folder or a hub repository. Raises `ModelError`, before anything large is loaded, if there
    is none."""
    name = os.path.expanduser(source)
    looks_like_path = not isinstance(source, str) or name.startswith((".", "/")) or name.count("/") > 1
    if not Path(name).is_dir() and (looks_like_path or Path(name).exists()):
        raise ModelError(
            f"there is no model folder {name!r}; give a folder with a config.json, or a hub id (org/model)"
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except Exception as error:
        raise ModelError(f"the model {name!r} cannot be loaded: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """An error's message up to its first line break."""
    return str(error).strip().split("\n")[0] or type(error).__name__
