"""Paged memory: committed on first touch, and returned to the system.

A checkpoint's weights are in pages of a mapped file, which count as the process's memory until released. Most pages of
a cache may never be touched.

Weights shared by processes, found by content.

The processes inherit one in-memory file, initially empty. It begins with an index: the number of pieces, and the
digest, offset and length of each. A piece is written, then indexed, and never changed; a writer holds a lock, which the
system releases if its process dies. Processes map pieces copy-on-write, in huge pages if available.
"""

import ctypes
import math
import mmap
import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import xxhash

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
        """Write bytes `[n]` uint8, and then index them under `key`, their digest and length."""
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
    """Return a shared tensor with the same elements `[…]`, of any dtype; the given one if it is small, already in a
    file, or nothing is shared."""
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


MADV_DONTNEED, MADV_POPULATE_WRITE = 4, 23
LARGE_PAGE = 2**21


def untouched_memory(num_bytes: int) -> torch.Tensor:
    """A tensor `[num_bytes]` int8, committed on first touch, in huge pages if available: with 4 KiB pages, TLB misses
    on scattered blocks cost more than reading them."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)[:num_bytes]


def new_weight(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor `[*sizes]` of this dtype, in huge pages if it fills one: they have fewer TLB misses and
    longer hardware prefetch."""
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes < LARGE_PAGE:
        return torch.empty(sizes, dtype=dtype)
    return untouched_memory(num_bytes).view(dtype).view(sizes)


def populate(memory: memoryview) -> None:
    """Commit the pages of writable memory now. Does nothing before Linux 5.14."""
    if sys.platform == "linux":
        address, page = ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE
        first, last = address // page * page, -(-(address + memory.nbytes) // page) * page
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_POPULATE_WRITE)


def lies_in_file(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor `[…]`, of any dtype, is a mapped file. False outside Linux."""
    first = tensor.data_ptr()
    return sys.platform == "linux" and tensor.device.type == "cpu" and _is_file(first, first + tensor.nbytes)


def release_file_pages(tensor: torch.Tensor) -> None:
    """Release the pages of a tensor `[…]`, of any dtype, that is contiguous in a mapped file. Later reads reload them
    from the file; writes are lost. Does nothing outside Linux."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.data_ptr():
        return
    if not (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.T.is_contiguous())):
        return
    page = mmap.PAGESIZE  # pages shared with neighbours in the file stay
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    if first < last and _is_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


def give_back_freed_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _is_file(first: int, last: int) -> bool:
    """Whether the addresses from `first` to `last` are in one file mapping."""
    lines = Path("/proc/self/maps").read_bytes().splitlines()  # sorted by address

    def begin(line: bytes) -> int:
        return int(line.partition(b"-")[0], 16)

    place = bisect_right(lines, first, key=begin)
    if not place:
        return False
    addresses, _, _, _, inode, *_ = lines[place - 1].split()
    return last <= int(addresses.partition(b"-")[2], 16) and inode != b"0"
