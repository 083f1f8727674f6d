"""A GGUF file's metadata become a configuration, by `transformers`' mapping."""

import mmap
import struct
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from inflight.contracts.errors import ModelError
from inflight.gguf.header import MAGIC, Counted, GgufHeader

UINT32 = 4
"""What metadata of this type are called."""
OVERLOOKED = {
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of metadata, and what a configuration calls them if it has them."""
ROOM = 2**16
"""Bytes behind a header, where its tensors would lie."""


def read_gguf_config(header: GgufHeader) -> PreTrainedConfig:
    """The configuration that `transformers` makes of a file's metadata. Raises `ModelError` if it cannot.

    It is given a copy of the header without the vocabulary, of which it would read each word in 10 µs.
    """
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{str(header.path)!r} holds no language model: it has no token_embd.weight")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "header.gguf").write_bytes(_short_copy(header))
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf")
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise ModelError(f"{str(header.path)!r} cannot be loaded: {line}") from error
    config.dtype = "float32" if {each.kind for each in header.tensors.values()} == {"F32"} else "bfloat16"
    _complete(config, header)
    return config


def _complete(config: PreTrainedConfig, header: GgufHeader) -> None:
    """Set what `transformers` overlooks in some architectures' metadata."""
    config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    for key, name in OVERLOOKED.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        if (
            value is not None
            and hasattr(config, name)
            and not (name == "head_dim" and hasattr(config, "global_head_dim"))
        ):
            setattr(config, name, value)


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
