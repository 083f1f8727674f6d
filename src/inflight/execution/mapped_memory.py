"""Memory in pages: taken when first touched, and given back to the system.

A checkpoint's weights lie in pages of a mapped file, which count as the process's memory until they are let go. A cache
lies in pages most of which may never be needed.
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
    """A tensor `[num_bytes]` int8 that takes memory only where it is touched. It lies in large pages if the system has
    them: with pages of 4 KiB, the processor needs longer to find scattered blocks than to read them."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)[:num_bytes]


def new_weight(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that holds anything. In large pages, if it fills one: the processor reads them faster, as it looks up
    fewer addresses and reads ahead farther."""
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes < LARGE_PAGE:
        return torch.empty(sizes, dtype=dtype)
    return untouched_memory(num_bytes).view(dtype).view(sizes)


def populate(memory: memoryview) -> None:
    """Take the pages of writable memory from the system now, whatever is in them. Does nothing where that cannot be
    asked for (before Linux 5.14)."""
    if sys.platform == "linux":
        address, page = ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE
        first, last = address // page * page, -(-(address + memory.nbytes) // page) * page
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_POPULATE_WRITE)


def lies_in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a mapped file's. False on systems other than Linux."""
    first = tensor.data_ptr()
    return sys.platform == "linux" and tensor.device.type == "cpu" and _is_file(first, first + tensor.nbytes)


def release_file_pages(tensor: torch.Tensor) -> None:
    """Let the pages of a tensor go if it lies in one piece in a mapped file. Reading it again reads the file again;
    anything that was written to it is lost. Does nothing on systems other than Linux."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.data_ptr():
        return
    if not (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.T.is_contiguous())):
        return
    page = mmap.PAGESIZE  # pages that the tensor shares with its neighbours in the file stay
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    if first < last and _is_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


def give_back_freed_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _is_file(first: int, last: int) -> bool:
    """Whether the addresses from `first` up to `last` lie in one mapping of a file."""
    lines = Path("/proc/self/maps").read_bytes().splitlines()  # in the order of addresses

    def begin(line: bytes) -> int:
        return int(line.partition(b"-")[0], 16)

    place = bisect_right(lines, first, key=begin)
    if not place:
        return False
    addresses, _, _, _, inode, *_ = lines[place - 1].split()
    return last <= int(addresses.partition(b"-")[2], 16) and inode != b"0"
