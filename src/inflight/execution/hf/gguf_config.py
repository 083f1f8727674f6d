"""Converts a GGUF file's metadata to a configuration, by `transformers`' mapping."""

import mmap
import struct
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from inflight.contracts.api.errors import ModelError
from inflight.gguf.header import MAGIC, Counted, GgufHeader

UINT32 = 4
"""The name of metadata of this type."""
OVERLOOKED = {
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata keys, and their names in configurations that have them."""
SCALING = ("type", "factor", "original_context_length")
GEMMA_27B = (("gemma2", 46), ("gemma3", 62))
"""Numbers of layers of the models of these families that scale scores by the head size; llama.cpp also identifies them
by this number."""
ROOM = 2**16
"""Bytes behind a header, where its tensors would lie."""


def read_gguf_config(header: GgufHeader) -> PreTrainedConfig:
    """The configuration that `transformers` makes from a file's metadata. Raises `ModelError` on failure.

    It reads a copy of the header without the vocabulary, which would take 10 µs per word.
    """
    if "token_embd.weight" not in header.tensors:
        why = "it has no token_embd.weight"
        if header.architecture == "clip":
            why = "it has the encoders of one (mmproj); for images and sounds, give the checkpoint's own folder"
        raise ModelError(f"{str(header.path)!r} holds no language model: {why}")
    try:
        config = _config_of(header)
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise ModelError(f"{str(header.path)!r} cannot be loaded: {line}") from error
    config.dtype = "float32" if {each.kind for each in header.tensors.values()} == {"F32"} else "bfloat16"
    _complete(config, header)
    return config


def _config_of(header: GgufHeader) -> PreTrainedConfig:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config  # imports torch

    if header.architecture in GGUF_CONFIG_ARCHS:
        vocab_size = header.tensors["token_embd.weight"].shape[0]
        metadata = {**header.metadata, "tokenizer.ggml.tokens": vocab_size}
        return AutoConfig.for_model(**get_gguf_config(metadata, tuple(header.tensors)))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "header.gguf").write_bytes(_short_copy(header))
        return AutoConfig.from_pretrained(folder, gguf_file="header.gguf")


def _complete(config: PreTrainedConfig, header: GgufHeader) -> None:
    """Set values that `transformers` overlooks in some architectures' metadata."""
    config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(config, name, None) or 0) >= config.vocab_size:
            setattr(config, name, None)  # an unassigned role: torch refuses to pad with it
    for key, name in OVERLOOKED.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        is_computed = isinstance(getattr(type(config), name, None), property)
        if value is None or not hasattr(config, name) or is_computed:
            continue
        if name == "head_dim" and hasattr(config, "global_head_dim"):
            continue  # Gemma 4 has two, and `transformers` knows which this is
        setattr(config, name, value)
    _scale_positions(config, header)
    num_layers = header.metadata.get(f"{header.architecture}.block_count")
    if (header.architecture, num_layers) in GEMMA_27B:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _scale_positions(config: PreTrainedConfig, header: GgufHeader) -> None:
    """Set how positions are scaled beyond the context of training."""
    scaling = {key: header.metadata.get(f"{header.architecture}.rope.scaling.{key}") for key in SCALING}
    kind, factor = scaling["type"], scaling["factor"]
    if kind in (None, "none") or factor in (None, 0, 1):
        return
    if kind not in ("linear", "yarn") or not isinstance(getattr(config, "rope_parameters", None), dict):
        raise ModelError(f"{str(header.path)!r} scales positions in a way ({kind!r}) that is not read from GGUF here")
    changes = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and scaling["original_context_length"] is not None:
        changes["original_max_position_embeddings"] = scaling["original_context_length"]
    parameters = config.rope_parameters
    config.rope_parameters = (
        {**parameters, "full_attention": {**parameters["full_attention"], **changes}}
        if "full_attention" in parameters
        else {**parameters, **changes}
    )


def _short_copy(header: GgufHeader) -> bytes:
    """A GGUF file with the same metadata, except long arrays, and with tensors of the same names, all of one number."""
    with open(header.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        kept = [content[slice(*place)] for key, place in header.places.items() if not _is_long(header.metadata[key])]
    key = f"{header.architecture}.vocab_size"
    if key not in header.metadata:
        name = key.encode()
        size = header.tensors["token_embd.weight"].shape[0]
        kept.append(struct.pack("<Q", len(name)) + name + struct.pack("<II", UINT32, size))
    tensors = [
        struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<IQIQ", 1, 1, 0, 0)
        for name in header.tensors
    ]
    return b"".join([MAGIC, struct.pack("<IQQ", 3, len(tensors), len(kept)), *kept, *tensors, bytes(ROOM)])


def _is_long(value: Any) -> bool:
    return isinstance(value, Counted) or (isinstance(value, list) and bool(value) and isinstance(value[0], str))
