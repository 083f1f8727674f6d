"""What is in a folder of prefixes, whether it is whole, and how it is emptied. For people: engines do not ask."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.prefix_store import block_file
from inflight.prefix_store.block_folder import ABOUT_NAME, KEY_NAME


@dataclass(frozen=True, slots=True)
class Holding:
    """The blocks of one fingerprint.

    Attributes:
        about: what wrote them, as it says itself; empty if nobody knows.
        first_used, last_used: seconds since the epoch; 0 without blocks.
    """

    path: Path
    about: dict[str, Any]
    num_blocks: int
    num_bytes: int
    first_used: float
    last_used: float

    @property
    def fingerprint(self) -> str:
        """In hexadecimal."""
        return self.path.name


def holdings(folder: Path) -> list[Holding]:
    """What is in a folder, the latest used first. Raises `ValueError` if it is no folder of prefixes."""
    if not (folder / KEY_NAME).is_file():
        raise ValueError(f"{str(folder)!r} is no folder of prefixes")
    found = []
    for path in folder.iterdir():
        if path.is_dir():
            states = [each.stat() for each in _files(path)]
            times = [state.st_mtime for state in states] or [0.0]
            num_bytes = sum(state.st_size for state in states)
            found.append(Holding(path, _about(path), len(states), num_bytes, min(times), max(times)))
    return sorted(found, key=lambda each: each.last_used, reverse=True)


def damaged(holding: Holding) -> Iterator[tuple[Path, str]]:
    """Read all blocks; yield those that are damaged, and why, in words that follow the file's name."""
    for path in _files(holding.path):
        reason = block_file.examine(path)
        if reason is not None:
            yield path, reason


def clear(holding: Holding, used_before: float) -> tuple[int, int]:
    """Delete the blocks that were not used since a time (seconds since the epoch). Returns their number and bytes."""
    num_blocks = num_bytes = 0
    for path in _files(holding.path):
        state = path.stat()
        if state.st_mtime < used_before:
            path.unlink(missing_ok=True)
            num_blocks, num_bytes = num_blocks + 1, num_bytes + state.st_size
    return num_blocks, num_bytes


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.glob("??/*") if not each.name.endswith(block_file.PARTIAL))


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / ABOUT_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
