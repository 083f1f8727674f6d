"""Paged memory: committed on first touch, and returned to the system.

A checkpoint's weights are in pages of a mapped file, which count as the process's memory until released. Most pages of
a cache may never be touched.
"""

import ctypes
import math
import mmap
import sys
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import torch

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
    """An uninitialised tensor, in huge pages if it fills one: they have fewer TLB misses and longer hardware
    prefetch."""
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
    """Whether a tensor's memory is a mapped file. False outside Linux."""
    first = tensor.data_ptr()
    return sys.platform == "linux" and tensor.device.type == "cpu" and _is_file(first, first + tensor.nbytes)


def release_file_pages(tensor: torch.Tensor) -> None:
    """Release the pages of a tensor that is contiguous in a mapped file. Later reads reload them from the file; writes
    are lost. Does nothing outside Linux."""
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
