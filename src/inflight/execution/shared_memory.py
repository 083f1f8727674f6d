"""Weights shared by processes, found by content.

The processes inherit one in-memory file, initially empty. It begins with an index: the number of pieces, and the
digest, offset and length of each. A piece is written, then indexed, and never changed; a writer holds a lock, which the
system releases if its process dies. Processes map pieces copy-on-write, in huge pages if available.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import xxhash

from inflight.execution.mapped_memory import lies_in_file

MIN_BYTES = 2**16
"""Smaller tensors are not shared."""
ALIGNMENT = 2**21
"""Alignment of pieces: a huge page."""
INDEX_BYTES = ALIGNMENT
COUNT, ENTRY = struct.Struct("<Q"), struct.Struct("<16sQQ")


class SharedFile:
    """One process's view of the file.

    Args:
        file: its descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        with _locked(file):
            os.ftruncate(file, max(INDEX_BYTES, os.fstat(file).st_size))
        self._places: dict[tuple[bytes, int], int] = {}  # by digest and length

    def share(self, content: torch.Tensor) -> torch.Tensor | None:
        """Return the shared copy of these bytes `[n]` uint8; None if the index is full."""
        key = xxhash.xxh3_128_digest(content.numpy().data), content.nbytes
        with _locked(self._file), _mapped(self._file, INDEX_BYTES, 0) as index:
            self._read(index)
            if key not in self._places:
                if COUNT.size + (len(self._places) + 1) * ENTRY.size > INDEX_BYTES:
                    return None
                self._write(index, key, content)
        found = _private(self._file, content.nbytes, self._places[key])
        return found if torch.equal(found, content) else None

    def _read(self, index: mmap.mmap) -> None:
        """Read new index entries."""
        (count,) = COUNT.unpack_from(index, 0)
        for number in range(len(self._places), count):
            digest, place, length = ENTRY.unpack_from(index, COUNT.size + number * ENTRY.size)
            self._places[digest, length] = place

    def _write(self, index: mmap.mmap, key: tuple[bytes, int], content: torch.Tensor) -> None:
        place = os.fstat(self._file).st_size
        os.ftruncate(self._file, place + -(-content.nbytes // ALIGNMENT) * ALIGNMENT)
        with _mapped(self._file, content.nbytes, place) as memory:
            torch.frombuffer(memory, dtype=torch.uint8).copy_(content)
        ENTRY.pack_into(index, COUNT.size + len(self._places) * ENTRY.size, key[0], place, key[1])
        COUNT.pack_into(index, 0, len(self._places) + 1)
        self._places[key] = place


_of_process: SharedFile | None = None


def share_through(file: int) -> None:
    """Share this process's weights in this file from now on."""
    global _of_process
    _of_process = SharedFile(file)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a shared tensor with the same elements; the given one if it is small, already in a file, or nothing is
    shared."""
    if _of_process is None or tensor.nbytes < MIN_BYTES or not tensor.is_contiguous() or lies_in_file(tensor):
        return tensor
    found = _of_process.share(tensor.view(-1).view(torch.uint8))
    return tensor if found is None else found.view(tensor.dtype).view(tensor.shape)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    import fcntl  # which Windows lacks, where nothing is shared

    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


@contextmanager
def _mapped(file: int, num_bytes: int, place: int) -> Iterator[mmap.mmap]:
    """A part of the file, to be written."""
    memory = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, offset=place)
    try:
        _in_large_pages(memory)
        yield memory
    finally:
        with suppress(BufferError):  # a tensor over it is still being freed, which closes it
            memory.close()


def _private(file: int, num_bytes: int, place: int) -> torch.Tensor:
    """A part of the file as a tensor `[num_bytes]` uint8."""
    memory = mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE, offset=place)
    _in_large_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _in_large_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
