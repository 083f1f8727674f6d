"""Possible disk contents after a power loss: everything that was synced, and any part of the rest.

`recorded_writes.c` records what a process does to the files of a folder; `Disk` replays it up to any moment. A file's
content survives as it was at its last sync; each write since then may have reached the disk as a whole, in part (of
sectors), or not at all. Names survive as of the last sync of their folder; a prefix of the later renames, creations and
removals may survive, too.
"""

import random
import shutil
import struct
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SECTOR = 512
HEAD = struct.Struct("<cqqq")


def recorder(folder: Path) -> Path:
    """The library that records, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / "recorded_writes.so"
    source = Path(__file__).with_name("recorded_writes.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


@dataclass(frozen=True)
class Operation:
    """An operation of a process. `what`: c(reate), w(rite), t(runcate), s(ync), u(nlink), r(ename), d (make a folder),
    m(ark)."""

    what: str
    path: str
    offset: int
    data: bytes


def read_log(log: Path) -> list[Operation]:
    """The recorded operations, in order."""
    content, operations, place = log.read_bytes(), [], 0
    while place < len(content):
        what, offset, path_length, length = HEAD.unpack_from(content, place)
        place += HEAD.size
        path = content[place : place + path_length].decode()
        data = content[place + path_length : place + path_length + length]
        place += path_length + length
        operations.append(Operation(what.decode(), path, offset, data))
    return operations


@dataclass(eq=False)
class Content:
    """The content of a file, or the mark of a folder."""

    is_folder: bool = False
    synced: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes, and where it was cut (None)."""

    def sync(self) -> None:
        for offset, data in self.since:
            change(self.synced, offset, data)
        self.since.clear()

    def after_loss(self, rng: random.Random) -> bytes:
        survived = bytearray(self.synced)
        for offset, data in self.since:
            fate = rng.random()
            if fate < 0.4:
                change(survived, offset, data)
            elif fate < 0.7 and data is not None:  # torn: some of its sectors
                for start in range(0, len(data), SECTOR):
                    if rng.random() < 0.5:
                        change(survived, offset + start, data[start : start + SECTOR])
        return bytes(survived)


def change(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write data to a file's content, or cut it."""
    if data is None:
        del content[offset:]
        return
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


class Disk:
    """A folder as a process sees it, and its durable part."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._now: dict[str, Content] = {}
        self._synced: dict[str, Content] = {}
        self._since: dict[str, list[tuple[str, Content | None]]] = defaultdict(list)
        self.marks: list[str] = []

    def do(self, operation: Operation) -> None:
        """Replay an operation."""
        what, path = operation.what, operation.path
        if what == "m":
            self.marks.append(path)
        elif what in "cd":
            self._name(path, Content(is_folder=what == "d"))
        elif what == "u":
            self._name(path, None)
        elif what == "r":
            self._name(operation.data.decode(), self._now[path])
            self._name(path, None)
        elif what == "s" and (path == self._root or self._now[path].is_folder):
            for name, content in self._since.pop(path, []):
                put(self._synced, name, content)
        elif what == "s":
            self._now[path].sync()
        else:
            self._now[path].since.append((operation.offset, operation.data if what == "w" else None))

    def _name(self, path: str, content: Content | None) -> None:
        put(self._now, path, content)
        self._since[str(Path(path).parent)].append((path, content))

    def write_after_loss(self, rng: random.Random, to: Path) -> None:
        """Write a possible state of the folder after a power loss at this moment."""
        names = dict(self._synced)
        for since in self._since.values():
            for name, content in since[: rng.randint(0, len(since))]:
                put(names, name, content)
        to.mkdir()
        for name, content in sorted(names.items()):
            path = to / Path(name).relative_to(self._root)
            if not path.parent.is_dir():
                continue  # its folder was lost
            if content.is_folder:
                path.mkdir()
            else:
                path.write_bytes(content.after_loss(rng))


def put(names: dict[str, Content], path: str, content: Content | None) -> None:
    if content is None:
        names.pop(path, None)
    else:
        names[path] = content
