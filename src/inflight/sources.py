"""What counts as a model, a tokenizer and an option of the fronts, and what is made of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.options import refuse_unknown_options
from inflight.demo_model import DEMO_MODEL
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase


def is_loaded_model(given: object) -> bool:
    """Whether this is a `PreTrainedModel`. Imports nothing: a caller that has one has imported its class, and torch."""
    return _is_instance(given, "transformers.modeling_utils", "PreTrainedModel")


def is_loaded_tokenizer(given: object) -> bool:
    """Whether this is a `PreTrainedTokenizerBase`; see `is_loaded_model`."""
    return _is_instance(given, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")


def _is_instance(given: object, module: str, name: str) -> bool:
    return module in sys.modules and isinstance(given, getattr(sys.modules[module], name))


def engine_config(options: Mapping[str, Any], owner: str) -> EngineConfig:
    """A front's options as a configuration. Raises `ValueError` if one is unknown or out of range."""
    refuse_unknown_options(options, [field.name for field in fields(EngineConfig)], owner)
    options = dict(options)
    for name in ("dtype", "device"):  # torch.bfloat16 and torch.device("cuda") are accepted, too
        if type(options.get(name)).__module__ == "torch":
            options[name] = str(options[name]).removeprefix("torch.")
    for name in ("draft_model", "prefix_cache_dir"):
        if isinstance(options.get(name), str | os.PathLike):
            options[name] = os.path.expanduser(os.fspath(options[name]))
    if isinstance(options.get("adapters"), Mapping):
        options["adapters"] = {
            name: full_source(source) if isinstance(source, str | os.PathLike) else source
            for name, source in options["adapters"].items()
        }
    return EngineConfig(**options)


def full_source(source: str | os.PathLike[str]) -> str:
    """A hub id as it is; a folder as an absolute path: another process, or a later one, may be in another folder."""
    folder = os.path.expanduser(os.fspath(source))
    return os.path.abspath(folder) if os.path.isdir(folder) else folder


def model_source(model: object) -> str | PreTrainedModel:
    """A hub id, a folder with `~` expanded, or a loaded model; None is the embedded model. Raises `ModelError` for
    anything else."""
    if model is None:
        return str(DEMO_MODEL)
    if is_loaded_model(model):
        return model
    if isinstance(model, str | os.PathLike):
        return os.path.expanduser(os.fspath(model))
    raise ModelError(
        f"the model is a {type(model).__name__}; it must be a hub id, a folder, or a transformers PreTrainedModel"
    )


def load_tokenizer(
    model: str | PreTrainedModel, tokenizer: TokenizerSource | None, config: EngineConfig
) -> Tokenizer | None:
    """The tokenizer that was given, else the one that comes with the model; None if there is none. Raises
    `ModelError`."""
    if is_loaded_tokenizer(tokenizer):
        return Tokenizer(tokenizer)
    if tokenizer is None and is_loaded_model(model):
        return None
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, str | os.PathLike):
        raise ModelError(f"the tokenizer is a {type(source).__name__}; it must be a hub id, a folder, or a loaded one")
    name = os.path.expanduser(os.fspath(source))
    loaded = read_tokenizer(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    if loaded is None and tokenizer is not None:
        raise ModelError(f"there is no tokenizer in {name!r}")
    return loaded
