"""Exports prefixes to a file and imports them: a tar of a folder of prefixes with its own key.

Only blocks that can be reached from a root without a `cache_salt` are written, each after its parent.
"""

import io
import json
import re
import secrets
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inflight.contracts.step.block_hash import Root
from inflight.prefix_store import block_file
from inflight.prefix_store.block_folder import (
    ABOUT_NAME,
    KEY_NAME,
    KEY_SIZE,
    PINNED_MODE,
    BlockFolder,
    Naming,
    is_pinned,
)
from inflight.prefix_store.inspection import StoredFingerprint, parse_about

MODE = 0o600
ROOTS = tuple(Root(None, is_long).block_hash for is_long in (False, True))
"""Before the first block of a prompt without salt or adapter. Encoder outputs stay: a salted prompt may have made
them."""
BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.[0-9]{1,9}")
BLOCK_PATH = re.compile(rf"([0-9a-f]{{64}})/[0-9a-f]{{2}}/({BLOCK_NAME.pattern})")
ABOUT_PATH = re.compile(rf"([0-9a-f]{{64}})/{re.escape(ABOUT_NAME)}")


@dataclass(slots=True)
class ArchiveTotals:
    """Totals of an export or import.

    Attributes:
        num_damaged: damaged files, left out.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_damaged: int = 0


# --------------------------------------------------------------------------------------------- into an archive


def write_archive(
    folder: Path, stored_fingerprints: list[StoredFingerprint], file: IO[bytes], *, only_pinned: bool = False
) -> ArchiveTotals:
    """Write the prefixes of some fingerprints in a folder to a file, those without a `cache_salt`.

    Args:
        only_pinned: leave out unpinned blocks.

    Raises `OSError`.
    """
    moved, key, reached = ArchiveTotals(), secrets.token_bytes(KEY_SIZE), set(ROOTS)
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, KEY_NAME, key)
        for holding in stored_fingerprints:
            naming = Naming(key, bytes.fromhex(holding.fingerprint))
            _add(archive, f"{holding.fingerprint}/{ABOUT_NAME}", json.dumps(holding.about).encode())
            for path in _from(holding):
                with suppress(FileNotFoundError):  # an engine has deleted it
                    status = path.stat()
                    if only_pinned and not is_pinned(status):
                        continue
                    data = path.read_bytes()
                    try:
                        content, _ = block_file.parse(data)
                    except ValueError:
                        moved.num_damaged += 1
                        continue
                    if content.parent in reached:
                        reached.add(content.block_hash)
                        name = naming.path_of(content.block_hash, content.group)
                        _add(archive, name, data, PINNED_MODE if is_pinned(status) else MODE, status.st_mtime)
                        moved.num_blocks, moved.num_bytes = moved.num_blocks + 1, moved.num_bytes + len(data)
    return moved


def _from(holding: StoredFingerprint) -> Iterator[Path]:
    """The files of the blocks that can be reached, parents first."""
    children: dict[bytes, list[tuple[bytes, Path]]] = defaultdict(list)
    for path in holding.files():
        if BLOCK_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                own, parent = block_file.hashes_in(path)
                children[parent].append((own, path))
    reached = list(ROOTS)
    while reached:
        found = children.pop(reached.pop(), [])
        yield from (path for _, path in found)
        reached += {own for own, _ in found}


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = MODE, time: float = 0.0) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), mode, time
    archive.addfile(member, io.BytesIO(data))


# --------------------------------------------------------------------------------------------- out of an archive


def read_archive(file: IO[bytes], path: Path, max_bytes: int) -> ArchiveTotals:
    """Add the prefixes in a file to a folder, which is created if missing.

    Args:
        max_bytes: of all files in the folder.

    Raises:
        ValueError: the file is invalid, or truncated (then the blocks before are added), or too much would be pinned.
        OSError: the folder cannot be used.
    """
    moved = ArchiveTotals()
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            members = ((member.name, member.mode, _read(archive, member)) for member in archive)
            name, _, key = next(members, ("", 0, b""))
            if name != KEY_NAME or len(key) != KEY_SIZE:
                raise ValueError("it does not begin with a key")
            reader = _Reader(key, path, max_bytes, moved)
            for name, mode, data in members:
                reader.take(name, mode, data)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"it is no archive of prefixes, or not a whole one: {error}") from error
    reader.pin()
    return moved


class _Reader:
    def __init__(self, key: bytes, path: Path, max_bytes: int, moved: ArchiveTotals) -> None:
        self._key, self._path, self._max_bytes, self._moved = key, path, max_bytes, moved
        self._about: dict[str, dict[str, Any]] = {}
        self._folders: dict[str, BlockFolder] = {}
        self._reached = set(ROOTS)
        self._pinned: dict[str, list[Path]] = defaultdict(list)

    def take(self, name: str, mode: int, data: bytes) -> None:
        """Import one member of the archive."""
        if found := ABOUT_PATH.fullmatch(name):
            self._about[found[1]] = parse_about(data)
        elif found := BLOCK_PATH.fullmatch(name):
            self._take_block(found[1], name, mode, data)
        else:
            raise ValueError(f"it holds {name[:100]!r}, which is no block")

    def _take_block(self, fingerprint: str, name: str, mode: int, data: bytes) -> None:
        folder = self._of(fingerprint)
        try:
            content, rows = block_file.parse(data)
            naming = Naming(self._key, bytes.fromhex(fingerprint))
            if name != naming.path_of(content.block_hash, content.group) or content.parent not in self._reached:
                raise ValueError("cannot be reached")
        except ValueError:
            self._moved.num_damaged += 1
            return
        self._reached.add(content.block_hash)
        path = folder.path_of(content.block_hash, content.group)
        if not path.exists():
            folder.make_place(path)
            folder.observe_written(block_file.write(path, content, [rows], lambda: True))
        self._moved.num_blocks, self._moved.num_bytes = self._moved.num_blocks + 1, self._moved.num_bytes + len(data)
        if mode == PINNED_MODE:
            self._pinned[fingerprint].append(path)

    def _of(self, fingerprint: str) -> BlockFolder:
        if fingerprint not in self._folders:
            digest = bytes.fromhex(fingerprint)
            is_known = (self._path / fingerprint / ABOUT_NAME).exists()
            about = None if is_known else self._about.get(fingerprint)
            self._folders[fingerprint] = BlockFolder(self._path, digest, self._max_bytes, about)
        return self._folders[fingerprint]

    def pin(self) -> None:
        """Pin the pinned blocks. Raises `ValueError` if that is too much."""
        for fingerprint, paths in self._pinned.items():
            self._folders[fingerprint].pin(paths)


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise tarfile.ReadError(f"{member.name[:100]!r} is no file")
    data = file.read()
    if len(data) != member.size:
        raise tarfile.ReadError("it ends early")
    return data
