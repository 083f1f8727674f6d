"""`GgufHeader`: the validated header of a GGUF file. An invalid file is refused in one sentence, before anything else
reads it.

The format: ggml's `docs/gguf.md`. All numbers are little-endian.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from inflight.contracts.api.errors import ModelError
from inflight.gguf.find import parts_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
MAX_DIMS = 4
MAX_NAME, MAX_KEY = 2**10, 2**16
"""Bytes of names; the format allows a tensor's 64."""
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` formats of fixed-size metadata types."""
SHORT = 4096
"""Longer arrays, which are vocabularies, are only counted unless requested."""

BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""The name of a tensor's type, the elements of a block, and its bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry.

    Attributes:
        path: the file.
        shape: in torch's order, the last dimension runs fastest.
        kind: the name of its type, a key of nothing but `BLOCKS`' values.
        start: its first byte in the file.
        nbytes: how many there are.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Counted:
    """Placeholder of a long metadata array."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's header; for a file in parts, the first's with the tensors of all.

    Attributes:
        metadata: by key; a long array is only `Counted`.
        places: for each key, where its entry begins and ends in the file.
        tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    places: dict[str, tuple[int, int]]
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it."""
        return str(self.metadata["general.architecture"])

    @property
    def num_parameters(self) -> int:
        """The elements of all tensors."""
        return sum(each.num_elements for each in self.tensors.values())

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, with_vocabulary: bool = False) -> "GgufHeader":
        """Read a file's header, optionally with long arrays. Raises `ModelError` if the file, or another part, cannot
        be read, or is not an intact GGUF file."""
        header = _read(Path(path), 2**63 if with_vocabulary else SHORT)
        if header.num_parts > 1:
            header = _joined(header)
        if not isinstance(header.metadata.get("general.architecture"), str):
            raise _unreadable(header.path, "does not say what architecture it has")
        return header

    @property
    def num_parts(self) -> int:
        """The files that it consists of."""
        count = self.metadata.get("split.count", 0)
        return count if type(count) is int and count > 1 else 1


MAX_LAST = 8
_last: dict[tuple[Path, int], tuple[int, bytes, int, GgufHeader]] = {}
"""A cache of headers, by path and longest array: the header's bytes, their digest, the file's size, the header. (A
start reads a header several times, and a vocabulary takes a tenth of a second.)"""


def _read(path: Path, longest: int) -> GgufHeader:
    """The header of one file alone."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end, digest, size, header = _last.get((path, longest), (0, b"", -1, None))
            if header is not None and size == len(content) and digest == xxhash.xxh3_128_digest(content[:end]):
                return header
            reader = _Reader(path, memoryview(content), longest)
            header = reader.header()
            if len(_last) > MAX_LAST:
                _last.clear()
            _last[path, longest] = reader.end, xxhash.xxh3_128_digest(content[: reader.end]), len(content), header
            return header
    except (OSError, ValueError) as error:  # mmap refuses an empty file
        raise ModelError(f"{str(path)!r} cannot be read: {error}") from error


def _joined(first: GgufHeader) -> GgufHeader:
    """The header of a file in several parts, of which this is the first."""
    names = parts_of(first.path.name)
    if len(names) != first.num_parts or first.metadata.get("split.no") != 0 or names[0] != first.path.name:
        called = f"NAME-00001-of-{first.num_parts:05}.gguf"
        raise _unreadable(first.path, f"is one of {first.num_parts} parts, but not the first, called {called}")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        part = _read(first.path.with_name(name), SHORT)
        if (part.metadata.get("split.no"), part.num_parts) != (number, first.num_parts):
            raise _unreadable(part.path, f"is not part {number + 1} of {first.num_parts}")
        if twice := tensors.keys() & part.tensors.keys():
            raise _unreadable(part.path, f"has the tensor {min(twice)!r}, which another part has, too")
        tensors |= part.tensors
    if len(tensors) != first.metadata.get("split.tensors.count", len(tensors)):
        raise _unreadable(first.path, f"and its other parts have {len(tensors)} tensors, not as many as it says")
    return replace(first, tensors=tensors)


class _Reader:
    """Parses a header, validating everything."""

    def __init__(self, path: Path, content: memoryview, longest: int) -> None:
        self._path = path
        self._content = content
        self._longest = longest  # of the arrays that are read
        self._at = 0
        self.end = 0

    def header(self) -> GgufHeader:
        try:
            return self._header()
        finally:
            self.end = self._at
            self._content.release()

    def _header(self) -> GgufHeader:
        if bytes(self._content[:4]) != MAGIC:
            raise self._error("does not begin with 'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
            raise self._error("is big-endian" if swapped else f"has version {version}, not one of {VERSIONS}")
        num_tensors, num_keys = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            start = self._at
            key = self._string(MAX_KEY)
            if key in metadata:
                raise self._error(f"has two values for {key!r}")
            metadata[key] = self._value(self._scalar("I"))
            places[key] = (start, self._at)
        alignment = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise self._error(f"has an alignment of {alignment}")
        return GgufHeader(self._path, metadata, places, self._tensors(num_tensors, alignment))

    def _tensors(self, number: int, alignment: int) -> dict[str, TensorEntry]:
        entries = [self._entry() for _ in range(number)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self._error(f"has two tensors {name!r}")
            if kind not in BLOCKS:
                raise self._error(f"has {name!r} in type {kind}, which is unknown")
            kind_name, block, num_bytes = BLOCKS[kind]
            if not 0 < len(shape) <= MAX_DIMS or 0 in shape or shape[-1] % block:
                raise self._error(f"gives {name!r} the sizes {shape}, which its type {kind_name} cannot have")
            if offset % alignment:
                raise self._error(f"has {name!r} at a place that is not aligned")
            nbytes = math.prod(shape) // block * num_bytes
            if start + offset + nbytes > len(self._content):
                raise self._error(f"ends before its tensor {name!r}: it is cut off, or not whole yet")
            tensors[name] = TensorEntry(self._path, name, shape, kind_name, start + offset, nbytes)
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(MAX_NAME), self._scalar("I")
        if num_dims > MAX_DIMS:
            raise self._error(f"has {name!r} with {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string(len(self._content))
        if kind != ARRAY:
            raise self._error(f"has metadata of type {kind}, which is unknown")
        element = self._scalar("I")
        if element in SCALARS:
            size = struct.calcsize(f"<{SCALARS[element]}")
            length = self._count(size)
            values = self._take(length * size)
            return (
                list(struct.unpack(f"<{length}{SCALARS[element]}", values))
                if length <= self._longest
                else Counted(length)
            )
        if element != STRING:
            raise self._error(f"has an array of type {element}, which is unknown")
        length = self._count(8)
        return self._strings(length)

    def _strings(self, length: int) -> list[str] | Counted:
        """As `_string` for each; a loop of its own, because a vocabulary has hundreds of thousands."""
        content, at, end, size_of = self._content, self._at, len(self._content), struct.Struct("<Q").unpack_from
        strings: list[bytes] = []
        is_read = length <= self._longest
        for _ in range(length):
            start = at + 8
            if start > end:
                at = start
                break
            at = start + size_of(content, at)[0]
            if is_read:
                strings.append(bytes(content[start:at]))
        self._take(at - self._at)
        try:
            return [each.decode() for each in strings] if is_read else Counted(length)
        except UnicodeDecodeError as error:
            raise self._error("has a name that is not UTF-8") from error

    def _string(self, longest: int) -> str:
        length = self._scalar("Q")
        if length > longest:
            raise self._error(f"has a name of {length} bytes")
        try:
            return bytes(self._take(length)).decode()
        except UnicodeDecodeError as error:
            raise self._error("has a name that is not UTF-8") from error

    def _count(self, size: int) -> int:
        """A count of entries of at least `size` bytes each."""
        number: int = self._scalar("Q")
        if number > (len(self._content) - self._at) // size:
            raise self._error(f"announces {number} entries, more than it has room for")
        return number

    def _scalar(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _take(self, num_bytes: int) -> memoryview:
        first, self._at = self._at, self._at + num_bytes
        if self._at > len(self._content):
            raise self._error("ends within its header: it is cut off, or not whole yet")
        return self._content[first : self._at]

    def _error(self, problem: str) -> ModelError:
        return _unreadable(self._path, problem)


def _unreadable(path: Path, problem: str) -> ModelError:
    return ModelError(f"{str(path)!r} is no GGUF file that can be read: it {problem}")
