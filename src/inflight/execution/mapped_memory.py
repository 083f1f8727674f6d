"""Memory as the system gives it: page by page as it is first touched, and back again.

A checkpoint's weights lie in pages of a file, which count as this process's memory until somebody lets them go. A cache
lies in pages of which most may never be needed.
"""

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch

MADV_DONTNEED = 4


def untouched_memory(num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` int8, of which only what is touched takes memory, in large pages where the system has them: to find
    scattered blocks in pages of 4 KiB takes the processor longer than to read them."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)[:num_bytes]


def let_go_of_file_pages(tensor: torch.Tensor) -> None:
    """If a tensor lies in one piece in a mapped file, let its pages go; whoever reads it again reads the file again.

    Nothing may have been written to it: that would be lost. Elsewhere than on Linux nothing happens.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    if not (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.T.is_contiguous())):
        return
    page = mmap.PAGESIZE  # what lies beside it in the file stays
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    if first < last and _is_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


def give_back_freed_memory() -> None:
    """What was freed goes back to the system, where the C library offers that."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _is_file(first: int, last: int) -> bool:
    """Whether all of these addresses are one mapping of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= first < end:
            return last <= end and inode != "0"
    return False
