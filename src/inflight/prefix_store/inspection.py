"""Lists, verifies and clears a folder of prefixes, for command-line tools."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inflight.prefix_store import block_file
from inflight.prefix_store.block_folder import ABOUT_NAME, HITS_NAME, KEY_NAME, Naming, is_pinned

FINGERPRINT = re.compile(r"([0-9a-f]{2})+")


@dataclass(frozen=True, slots=True)
class StoredFingerprint:
    """The blocks of one fingerprint.

    Attributes:
        about: the writer's description; empty if unknown.
        num_pinned_bytes: pinned bytes among these.
        num_hits: prompts that loaded a prefix from here.
        first_used, last_used: seconds since the epoch; 0 without blocks.
    """

    path: Path
    about: dict[str, Any]
    num_blocks: int
    num_bytes: int
    num_pinned_bytes: int
    num_hits: int
    first_used: float
    last_used: float

    @property
    def fingerprint(self) -> str:
        """In hexadecimal."""
        return self.path.name

    def files(self) -> list[Path]:
        """The files of all blocks, without partial ones."""
        found = (each for each in self.path.glob("??/*") if not each.name.endswith(block_file.PARTIAL))
        return sorted(each for each in found if each.is_file())


def stored_fingerprints(folder: Path) -> list[StoredFingerprint]:
    """The fingerprints in a folder, the latest used first. Raises `ValueError` if it is not a folder of prefixes."""
    if not (folder / KEY_NAME).is_file():
        raise ValueError(f"{str(folder)!r} is no folder of prefixes")
    found = [_holding(path) for path in folder.iterdir() if FINGERPRINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda each: each.last_used, reverse=True)


def damaged(holding: StoredFingerprint) -> Iterator[tuple[Path, str]]:
    """Read all blocks; yield those that are damaged, and why, in words that follow the file's name."""
    naming = Naming((holding.path.parent / KEY_NAME).read_bytes(), bytes.fromhex(holding.fingerprint))
    for path in holding.files():
        try:
            content, _ = block_file.parse(path.read_bytes())
            if Path(naming.path_of(content.block_hash, content.group)).name != path.name:
                yield path, "is of something else"
        except FileNotFoundError:
            continue
        except ValueError as reason:
            yield path, str(reason)


def clear(holding: StoredFingerprint, used_before: float, *, keep_pinned: bool = False) -> tuple[int, int]:
    """Delete the blocks not used since a time (seconds since the epoch). Returns their number and bytes."""
    num_blocks = num_bytes = 0
    for path, status in _statuses(holding.files()):
        if status.st_mtime < used_before and not (keep_pinned and is_pinned(status)):
            path.unlink(missing_ok=True)
            num_blocks, num_bytes = num_blocks + 1, num_bytes + status.st_size
    return num_blocks, num_bytes


def _statuses(paths: list[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Of those that are still there."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _holding(path: Path) -> StoredFingerprint:
    empty = StoredFingerprint(path, _about(path), 0, 0, 0, _num_hits(path), 0.0, 0.0)
    statuses = [status for _, status in _statuses(empty.files())]
    times = [status.st_mtime for status in statuses] or [0.0]
    return replace(
        empty,
        num_blocks=len(statuses),
        num_bytes=sum(status.st_size for status in statuses),
        num_pinned_bytes=sum(status.st_size for status in statuses if is_pinned(status)),
        first_used=min(times),
        last_used=max(times),
    )


def _num_hits(path: Path) -> int:
    try:
        return (path / HITS_NAME).stat().st_size
    except FileNotFoundError:
        return 0


def _about(path: Path) -> dict[str, Any]:
    try:
        return parse_about((path / ABOUT_NAME).read_bytes())
    except OSError:
        return {}


def parse_about(data: bytes) -> dict[str, Any]:
    """A writer's description; empty if unreadable."""
    try:
        about = json.loads(data)
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}
