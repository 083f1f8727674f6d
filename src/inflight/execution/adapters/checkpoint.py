"""`AdapterCheckpoint`: reads PEFT's `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).

Options of PEFT that change the output in unsupported ways are refused by name.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from inflight.contracts.api.errors import AdapterError

DIGEST_SIZE = 16
CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

REFUSED = {
    "use_dora": "DoRA changes the length of every column of a weight",
    "modules_to_save": "whole layers that were trained beside the adapter",
    "lora_bias": "biases of an adapter's own",
    "trainable_token_indices": "single rows of the embedding",
    "layer_replication": "a model whose layers are repeated",
    "use_qalora": "inputs that are averaged in groups",
    "alora_invocation_tokens": "an adapter that begins at certain tokens",
    "arrow_config": "a choice between adapters for each token",
    "use_bdlora": "block-diagonal matrices",
    "kasa_config": "singular values that were trained",
}
"""Unsupported options of PEFT, with their meaning."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "eva_")
"""Initialisations that also change the base model's weights: their adapters belong to other weights."""

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_(?:embedding_)?[AB])(?:\.default)?(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scale of an adapter's updates.

    Attributes:
        alpha: of all weights but those of `patterns`.
        patterns: the alpha of weights whose names end with a match of a regular expression; the first match counts.
        is_rank_stabilised: whether alpha is divided by the root of the rank (rsLoRA: Kalajdzievski, 2023) instead of
            the rank.
    """

    alpha: float
    patterns: Mapping[str, float]
    is_rank_stabilised: bool

    def factor(self, rank: int, *names: str) -> float:
        """The scale of a weight, known to PEFT by one of these names."""
        found = (a for p, a in self.patterns.items() for name in names if re.match(rf"(.*\.)?({p})$", name))
        return float(next(found, self.alpha)) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An adapter's update of one module's weight: `up @ down`, scaled.

    Attributes:
        module: its name in the model.
        down: `[rank, in]`; of several experts, `[experts * rank, in]`; of an embedding, `[rank, vocabulary]`.
        up: `[out, rank]`; of several experts, `[out, rank * experts]`, the experts running fastest.
        is_embedding: whether the weight is an embedding's.
    """

    module: str
    down: torch.Tensor
    up: torch.Tensor
    is_embedding: bool


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterCheckpoint:
    """A loaded adapter. Its matrices stay in the file until used.

    Attributes:
        digest: of its contents: equal digests give equal results.
        updates: its updates, in the order of the file.
    """

    digest: str
    updates: tuple[LowRankUpdate, ...]
    scaling: Scaling

    @classmethod
    def read(cls, source: str) -> "AdapterCheckpoint":
        """Read a folder or a hub repository. Raises `AdapterError` if it is not an adapter, or unsupported."""
        config_file = _file(source, CONFIG)
        if config_file is None:
            raise AdapterError(f"{source} is no adapter: there is no {CONFIG}")
        try:
            config = json.loads(config_file.read_text())
        except (OSError, ValueError) as error:
            raise AdapterError(f"{config_file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{config_file} has no options")
        _check_config(config)
        tensors, digest = _tensors(source)
        if not tensors:
            raise AdapterError(f"{source} is no adapter: its file has no tensors")
        digest.update(json.dumps(config, sort_keys=True).encode())
        scaling = Scaling(config["lora_alpha"], config.get("alpha_pattern") or {}, bool(config.get("use_rslora")))
        return cls(digest.hexdigest(), tuple(_updates(tensors)), scaling)


def _file(source: str, name: str) -> Path | None:
    """A file of an adapter; None: it does not exist."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if folder.is_absolute() or source.startswith((".", "~")):
        raise AdapterError(f"there is no folder {source}")
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise AdapterError(f"there is no folder {source}, nor a repository on the hub: {error}") from error
    return None if found is None else Path(found)


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type is {kind!r}; only 'LORA' is supported")
    for option, meaning in REFUSED.items():
        if config.get(option):
            raise AdapterError(f"{option} is {config[option]!r}: {meaning}; that is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}: biases that were trained; only 'none' is supported")
    beginning = config.get("init_lora_weights")
    if isinstance(beginning, str) and beginning.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"init_lora_weights is {beginning!r}, which changes the base model's weights, too; PEFT can save such an "
            "adapter as one for the original weights (path_initial_model_for_weight_conversion)"
        )
    _number(config.get("lora_alpha"), "lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"alpha_pattern is {patterns!r}; it must be an object")
    for pattern, alpha in patterns.items():
        _number(alpha, f"alpha_pattern[{pattern!r}]")
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"alpha_pattern has {pattern!r}, which is no pattern: {error}") from error


def _number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{name} is {value!r}; it must be a number")


def _tensors(source: str) -> tuple[dict[str, torch.Tensor], "hashlib._Hash"]:
    """The tensors `[…]` of an adapter by their names, in files that stay open, and a digest of the file. Raises
    `AdapterError` if it cannot be read."""
    path = _file(source, WEIGHTS) or _file(source, OLD_WEIGHTS)
    if path is None:
        raise AdapterError(f"{source} has neither {WEIGHTS} nor {OLD_WEIGHTS}")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_SIZE))
        if path.name == OLD_WEIGHTS:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            with safe_open(path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # unpickling may raise anything
        raise AdapterError(f"{path} holds more than tensors ({type(error).__name__})") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise AdapterError(f"{path} holds more than tensors")
    return tensors, digest


def _updates(tensors: Mapping[str, torch.Tensor]) -> list[LowRankUpdate]:
    """The updates of an adapter's tensors, float: pairs as in `LowRankUpdate`, `[rank, in]` and `[out, rank]`. Raises
    `AdapterError` for any other tensors."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".base_layer.weight"):  # the model's own, which PEFT saves beside an embedding's or a head's
            continue
        found = _KEY.fullmatch(name)
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            raise AdapterError(f"the tensor {name} {list(tensor.shape)} is no matrix of an adapter")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    updates = []
    for module, pair in pairs.items():
        is_embedding = "lora_embedding_A" in pair
        kind = "lora_embedding_" if is_embedding else "lora_"
        if pair.keys() != {f"{kind}A", f"{kind}B"}:
            raise AdapterError(f"{module} has {sorted(pair)}; it must have two matrices, A and B")
        down, up = pair[f"{kind}A"], pair[f"{kind}B"]
        if down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
            raise AdapterError(f"{module} has matrices {list(down.shape)} and {list(up.shape)}, which do not fit")
        updates.append(LowRankUpdate(module, down, up, is_embedding))
    return updates
