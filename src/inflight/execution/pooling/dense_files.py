"""`read_dense`: the dense layers that a checkpoint of `sentence-transformers` has in folders of its own."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file

from inflight.contracts.errors import ModelError
from inflight.execution.hf.source import first_line
from inflight.execution.pooling.heads import Dense


def read_dense(name: str, folders: Sequence[str], revision: str | None) -> dict[str, nn.Module]:
    """The dense layers of these folders of a checkpoint. Raises `ModelError` if one cannot be read.

    Args:
        name: a folder or a hub id.
    """
    layers: dict[str, nn.Module] = {}
    for folder in folders:
        try:
            config = json.loads(_path(name, f"{folder}/config.json", revision).read_text())
            try:
                state = load_file(_path(name, f"{folder}/model.safetensors", revision))
            except OSError:
                state = torch.load(_path(name, f"{folder}/pytorch_model.bin", revision), weights_only=True)
            layers[folder] = Dense(config, state)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"the layer {folder!r} of {name!r} cannot be read: {first_line(error)}") from error
    return layers


def _path(name: str, file: str, revision: str | None) -> Path:
    return Path(cached_file(name, file, revision=revision))
