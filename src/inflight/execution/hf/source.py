"""`check_source`: checks that a model exists, without importing torch. `read_config`: reads its configuration."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.gguf_config import read_gguf_config
from inflight.gguf.find import find_gguf, parts_of
from inflight.gguf.header import GgufHeader

if TYPE_CHECKING:
    pass


def check_source(source: str | os.PathLike[str], config: EngineConfig) -> None:
    """Raise `ModelError`, before anything large is loaded, if there is no model of this name."""
    gguf = find_gguf(source, config.revision)
    if gguf is None:
        read_config(source, config)
    else:
        GgufHeader.read(gguf)  # further checks need `transformers` and torch


def read_config(source: str | os.PathLike[str], config: EngineConfig) -> PreTrainedConfig:
    """The configuration of a folder, a hub repository or a GGUF file. Raises `ModelError` if there is none."""
    gguf = find_gguf(source, config.revision)
    if gguf is not None:
        return read_gguf_config(GgufHeader.read(gguf))
    name = os.path.expanduser(source)
    is_folder = Path(name).is_dir()
    looks_like_path = not isinstance(source, str) or name.startswith((".", "/")) or name.count("/") > 1
    instead = "give a folder with a config.json, a GGUF file, or a hub id (org/model)"
    if not is_folder and (looks_like_path or Path(name).exists()):
        raise ModelError(f"there is no model folder {name!r}; {instead}")
    if is_folder and not (Path(name) / "config.json").exists():
        raise ModelError(f"the folder {name!r} has no config.json; {instead}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except Exception as error:
        hint = f"; of a repository of GGUF files, name one: {name}:Q4_K_M" if "gguf" in name.lower() else ""
        raise ModelError(f"the model {name!r} cannot be loaded: {first_line(error)}{hint}") from error


def checkpoint_files(
    source: str | os.PathLike[str], config: EngineConfig, model_config: PreTrainedConfig
) -> list[Path]:
    """The files of a model's folder. Raises `FileNotFoundError` for a hub id that is not in the hub's cache."""
    gguf = find_gguf(source, config.revision)
    if gguf is not None:
        return [gguf.with_name(name) for name in parts_of(gguf.name)]
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        found = try_to_load_from_cache(str(source), "config.json", revision=model_config._commit_hash)
        if not isinstance(found, str):
            raise FileNotFoundError(f"{source} is not in the hub's cache")
        folder = Path(found).parent
    return [path for path in folder.iterdir() if path.is_file()]


def first_line(error: Exception) -> str:
    """An error's message up to its first line break."""
    return str(error).strip().split("\n")[0] or type(error).__name__
