"""`BlockFolder`: block files in a folder that several engines may share, within a limit of bytes.

Blocks are grouped by the fingerprint of what computed them. Their names are keyed by the folder's secret key, so that
neither a name nor lookup timing reveals prompts. The files contain tokens, so only their owner can read them (modes
0700 and 0600). There is no index: a block exists if its file does. Use updates a file's time, and beyond the limit the
least recently used files are deleted. Read-only files (mode 0400) are *pinned*, and stay.
"""

import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from inflight.prefix_store import block_file
from inflight.prefix_store.block_file import PARTIAL, Rows
from inflight.scheduling.persistence import BlockContent

KEY_SIZE = 32
DIGEST_SIZE = 32


class Naming:
    """The names of one fingerprint's blocks.

    Args:
        key: the folder's.
        fingerprint: of all that keys and values depend on besides tokens.
    """

    def __init__(self, key: bytes, fingerprint: bytes) -> None:
        self._key, self._fingerprint = key, fingerprint

    def path_of(self, block_hash: bytes, group: int) -> str:
        """Where a block's file lies in the folder."""
        name = blake2b(block_hash + self._fingerprint, key=self._key, digest_size=DIGEST_SIZE).hexdigest()
        return f"{self._fingerprint.hex()}/{name[:2]}/{name}.{group}"


logger = logging.getLogger(__name__)

KEY_NAME, ABOUT_NAME, HITS_NAME = "key", "about.json", "hits"
PINNED_MODE = 0o400
LARGEST_PINNED_SHARE = 0.5
"""The share of the limit that may be pinned."""
LEFT_AFTER_EVICTION = 0.9
"""The share of the limit that eviction leaves."""
RECOUNTS = 16
"""Recounts per limit of bytes written, since others write here, too."""
ABANDONED = 3600.0
"""Seconds after which a partial file is abandoned."""
MAX_LINES = 10
"""Failures of one kind that are logged; later ones are not."""


class BlockFolder:
    """The blocks of one fingerprint. Not thread-safe but for `has`, `read` and the names.

    Args:
        path: the folder; created if missing.
        fingerprint: of all that keys and values depend on besides tokens.
        max_bytes: of all files in the folder, whatever their fingerprint.
        about: a description of the writer, for people.

    Attributes:
        naming: the names of these blocks.
        write_error: why the latest block that could not be written was not.

    Raises:
        OSError: the folder cannot be made or used.
    """

    def __init__(
        self, path: Path, fingerprint: bytes, max_bytes: int, about: Mapping[str, object] | None = None
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.naming = Naming(_own_key(path / KEY_NAME), fingerprint)
        self._blocks = path / fingerprint.hex()
        self._num_bytes: int | None = None  # in the folder; None: not counted yet
        self._num_uncounted = 0  # bytes written since
        self.write_error: OSError | None = None
        self._num_failures: dict[str, int] = {}
        if about is not None:
            self._blocks.mkdir(mode=0o700, exist_ok=True)
            (self._blocks / ABOUT_NAME).write_text(json.dumps(dict(about)))

    def path_of(self, block_hash: bytes, group: int) -> Path:
        """Where a block's file lies, if there is one."""
        return self.path / self.naming.path_of(block_hash, group)

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether a block has a file."""
        return os.path.exists(self.path_of(block_hash, group))

    def num_files(self) -> int:
        """Number of block files."""
        return sum(1 for _ in self._blocks.glob("??/*"))

    def make_place(self, path: Path) -> None:
        """Make the folder of a block's file."""
        self._blocks.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder above may let others in
        path.parent.mkdir(mode=0o700, exist_ok=True)

    def announce(self, content: BlockContent) -> None:
        """A block is about to be read."""
        block_file.announce(self.path_of(content.block_hash, content.group))

    def read(self, content: BlockContent, memory: Rows) -> bool:
        """Read a block into memory. Returns whether it is there."""
        path = self.path_of(content.block_hash, content.group)
        try:
            reason = block_file.read(path, content, memory)
            if reason is None:
                self.observe_use(path)
                return True
            path.unlink(missing_ok=True)
            self._log("damaged", f"{path} {reason}; it is deleted, and its tokens are computed")
        except FileNotFoundError:
            pass  # deleted since it was looked for
        except OSError as error:
            self._log("unreadable", f"{path} cannot be read ({error}); its tokens are computed")
        return False

    def write(self, content: BlockContent, memory: Rows, is_current: Callable[[], bool]) -> bool:
        """Write a block that has no file yet, unless it is taken for something else meanwhile. Returns whether it was
        written."""
        path = self.path_of(content.block_hash, content.group)
        try:
            if not is_current() or path.exists():
                return False
            self.make_place(path)
            num_bytes = block_file.write(path, content, memory, is_current)
            if num_bytes:
                self.observe_written(num_bytes)
            return bool(num_bytes)
        except OSError as error:
            self.write_error = error
            self._log("unwritable", f"a block of the cache cannot be saved in {self.path} ({error})")
            return False

    def observe_use(self, path: Path) -> None:
        """Mark a file as used."""
        os.utime(path)

    def observe_hit(self) -> None:
        """Count a hit. (Hits are the bytes of a file, to which several engines can append.)"""
        with open(os.open(self._blocks / HITS_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(b".")

    def pin(self, paths: Sequence[Path]) -> None:
        """Pin files, skipping missing ones.

        Raises:
            ValueError: too many bytes would be pinned.
        """
        wanted = set(paths)
        sizes = {path: size for _, size, path, _ in self._files() if path in wanted}
        num_pinned = sum(size for _, size, path, stays in self._files() if stays and path not in wanted)
        most = int(self.max_bytes * LARGEST_PINNED_SHARE)
        if num_pinned + sum(sizes.values()) > most:
            raise ValueError(
                f"{sum(sizes.values()):,} bytes cannot be pinned in {str(self.path)!r}: {num_pinned:,} are already, "
                f"and {most:,} may be, half of all that it may have"
            )
        for path in sizes:
            with suppress(FileNotFoundError):
                path.chmod(PINNED_MODE)

    def observe_written(self, num_bytes: int) -> None:
        """Count a written file of `num_bytes`, and evict others beyond the limit."""
        self._num_uncounted += num_bytes
        if self._num_bytes is None or self._num_uncounted * RECOUNTS > self.max_bytes:
            self._num_bytes = sum(size for _, size, _, _ in self._files())
            self._num_uncounted = 0
        if self._num_bytes + self._num_uncounted > self.max_bytes:
            self._evict()

    def _log(self, kind: str, failure: str) -> None:
        number = self._num_failures[kind] = self._num_failures.get(kind, 0) + 1
        if number <= MAX_LINES:
            logger.warning("%s%s", failure, "; there will be no more such lines" if number == MAX_LINES else "")

    def _evict(self) -> None:
        files = sorted(self._files())
        num_bytes = sum(size for _, size, _, _ in files)
        for _, size, path, stays in files:
            if num_bytes <= self.max_bytes * LEFT_AFTER_EVICTION:
                break
            if not stays:
                path.unlink(missing_ok=True)  # another engine may have done it
                num_bytes -= size
        self._num_bytes, self._num_uncounted = num_bytes, 0

    def _files(self) -> Iterator[tuple[float, int, Path, bool]]:
        """Last use, size, path and pinning of each block's file. Deletes abandoned partial files, and skips
        non-files."""
        for path in self.path.glob("*/??/*"):
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if not path.name.endswith(PARTIAL):
                    yield status.st_mtime, status.st_size, path, is_pinned(status)
                elif time.time() - status.st_mtime > ABANDONED:
                    path.unlink()
            except FileNotFoundError:
                continue


def is_pinned(status: os.stat_result) -> bool:
    """Whether a file is pinned."""
    return not status.st_mode & stat.S_IWUSR


def _own_key(path: Path) -> bytes:
    """The folder's secret key, created if missing or unusable. Engines that start at once get the same."""
    for _ in range(2):
        new = path.with_name(f"{KEY_NAME}.{secrets.token_hex(8)}{PARTIAL}")
        if not path.exists():
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_SIZE))
            try:
                os.link(new, path)
            except FileExistsError:
                pass
            finally:
                new.unlink()
        if len(key := path.read_bytes()) == KEY_SIZE:
            return key
        path.unlink()  # damaged: its blocks are lost
    raise OSError(f"{path} cannot be made")
