"""Cached results of preparation, in files named by a digest of everything that they depend on."""

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import xxhash

from inflight.execution.kernels import cache_folder

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
