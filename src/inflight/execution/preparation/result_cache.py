"""Cached results of preparation, in files named by a digest of everything that they depend on.

The fingerprint of keys and values: a digest of everything that their bits depend on besides tokens.

It covers all weights as loaded, versions, dtypes and kernels, and the bits in the cache after running a few tokens.
"""

import hashlib
import json
import logging
import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch
import xxhash
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.executors import PackedExecutor
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.kernels import cache_folder, kernels_in_use
from inflight.execution.preparation.proof import draw_prompts
from inflight.execution.preparation.proof_result import own_code
from inflight.execution.ragged_batch import RaggedBatch

BYTES_AT_ONCE = 2**26


def digest_of_weights(model: PreTrainedModel) -> bytes:
    """A digest of a model's parameters and buffers, as they were loaded. Raises `ModelError` if some cannot be read."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted((*model.named_parameters(), *model.named_buffers()), key=lambda each: each[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        try:
            for part in _parts(tensor.detach()):
                for first in range(0, part.nbytes, BYTES_AT_ONCE):
                    digest.update(part[first : first + BYTES_AT_ONCE].numpy().data)
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"prefix_cache_dir: the weight {name} cannot be told from others: {error}") from error
    return digest.digest()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, `[n]` uint8 in one or more pieces."""
    if isinstance(tensor.data, GroupedWeight):
        for matrix in tensor.data.matrices:
            for each in (matrix.panels, matrix.order):
                if each is not None:
                    yield each.contiguous().flatten().view(torch.uint8)
    elif tensor.numel():
        yield tensor.contiguous().flatten().view(torch.uint8)


@torch.inference_mode()
def fingerprint(
    model: PreTrainedModel, executor: PackedExecutor, config: EngineConfig, num_blocks: int, weights_digest: bytes
) -> bytes:
    """The fingerprint of an executor, whose cache of `num_blocks` is still unused: 32 bytes."""
    rows = executor.rows_of_block(0)
    parts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")},
        "weights": weights_digest.hex(),
        "wanted": (
            config.quantization.method,
            config.quantization.arithmetic,
            config.kv_cache.dtype,
            config.kv_cache.block_size,
        ),
        "runs on": (str(model.dtype), kernels_in_use(), executor.backend.name),
        "lies as": (
            [str(each) for each in executor.cache_groups],
            [len(row) for row in rows],
            executor.bytes_per_state,
        ),
        "versions": [version(name) for name in ("torch", "transformers", "inflight-llm")],
    }
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=32)
    for path in own_code():
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    (prompt,) = draw_prompts(model.get_input_embeddings().weight.shape[0], [config.kv_cache.block_size])
    span = Span(0, 0, 0, list(prompt), 1, len(prompt))
    blocks = [group % num_blocks for group in range(len(executor.cache_groups))]
    tables = tuple((array("i", [block]),) for block in blocks)
    logits = executor.forward(
        RaggedBatch.from_plan(StepPlan((span,), tables), config.kv_cache.block_size, model.device)
    )
    digest.update(logits.contiguous().flatten().view(torch.uint8).numpy().data)
    for block in blocks:
        for row in executor.rows_of_block(block):
            digest.update(row)
    return digest.digest()


logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 16
MAX_RESULTS = 256
"""Most results of one type; the oldest are removed."""
T = TypeVar("T")


class ResultCache(Generic[T]):
    """Results of one type, a dataclass of plain data, by key. An unusable folder counts as empty, and a damaged file as
    missing.

    Args:
        folder: None keeps nothing.
        kind: the type of the results.
    """

    def __init__(self, folder: Path | None, kind: type[T]) -> None:
        self._folder = folder
        self._decoder = msgspec.msgpack.Decoder(kind)

    @classmethod
    def of_the_user(cls, kind: type[T]) -> "ResultCache[T]":
        """The user's cache; disabled if `INFLIGHT_CACHE_PREPARATIONS` is 0."""
        if os.environ.get("INFLIGHT_CACHE_PREPARATIONS") == "0":
            return cls(None, kind)
        try:
            return cls(cache_folder() / f"{kind.__name__.lower()}s", kind)
        except OSError:
            return cls(None, kind)

    @property
    def keeps(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def find(self, key: str | None) -> T | None:
        """The result for a key, if there is one."""
        if self._folder is None or key is None:
            return None
        try:
            content = (self._folder / key).read_bytes()
            if content[:CHECKSUM_BYTES] != xxhash.xxh3_128_digest(content[CHECKSUM_BYTES:]):
                return None
            return self._decoder.decode(content[CHECKSUM_BYTES:])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def keep(self, key: str | None, result: T) -> None:
        """Store a result."""
        if self._folder is None or key is None:
            return
        content = msgspec.msgpack.encode(result)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder.parent) as folder:
                whole = Path(folder) / key
                whole.write_bytes(xxhash.xxh3_128_digest(content) + content)
                os.replace(whole, self._folder / key)
            by_age = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in by_age[:-MAX_RESULTS]:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.info("the preparation's result cannot be cached: %s", error)

    def forget(self, key: str | None) -> None:
        """Remove a result that turned out to be wrong."""
        if self._folder is not None and key is not None:
            with suppress(OSError):
                (self._folder / key).unlink(missing_ok=True)
