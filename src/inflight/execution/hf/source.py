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
    is_folder = Path(name).is_dir()
    if name.lower().endswith(".gguf") or (is_folder and not Path(name, "config.json").exists() and _has_gguf(name)):
        raise ModelError(
            f"{name!r} is in GGUF, which is not read here; give the checkpoint that it was made from: a folder with a "
            "config.json and safetensors, or a hub id (org/model)"
        )
    looks_like_path = not isinstance(source, str) or name.startswith((".", "/")) or name.count("/") > 1
    if not is_folder and (looks_like_path or Path(name).exists()):
        raise ModelError(
            f"there is no model folder {name!r}; give a folder with a config.json, or a hub id (org/model)"
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except Exception as error:
        gguf = "; GGUF is not read here" if "gguf" in name.lower() else ""
        raise ModelError(f"the model {name!r} cannot be loaded: {first_line(error)}{gguf}") from error


def _has_gguf(folder: str) -> bool:
    return any(path.suffix.lower() == ".gguf" for path in Path(folder).iterdir())


def first_line(error: Exception) -> str:
    """An error's message up to its first line break."""
    return str(error).strip().split("\n")[0] or type(error).__name__
