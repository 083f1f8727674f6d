"""Memory that is a file: a checkpoint's weights lie in pages that the system maps in when they are first read, and that
count as this process's memory until somebody lets them go."""

import ctypes
import mmap
import sys
from pathlib import Path

import torch

MADV_DONTNEED = 4


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
