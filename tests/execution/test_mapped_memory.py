"""Pages of a mapped file go, and what they hold stays; no other memory is touched. Untouched memory takes none."""

import os
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.execution.mapped_memory import let_go_of_file_pages, untouched_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only done on Linux")
SHAPE = (1024, 4096)  # 16 MiB


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's pages is in memory."""
    page_size = os.sysconf("SC_PAGE_SIZE")
    first, last = tensor.data_ptr() // page_size, (tensor.data_ptr() + tensor.nbytes - 1) // page_size
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = numpy.fromfile(pages, numpy.uint64, last + 1 - first)
    return int((entries >> 63).sum()) * page_size


@pytest.mark.parametrize("transposed", [False, True])
def test_a_files_pages_go_and_come_back_when_they_are_read(tmp_path: Path, transposed: bool) -> None:
    expected = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    save_file({"first": expected, "second": -expected}, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["first"], expected)
    assert torch.equal(weights["second"], -expected)
    before = resident_bytes(weights["first"])
    let_go_of_file_pages(weights["first"].T if transposed else weights["first"])
    gone = before - resident_bytes(weights["first"])
    assert 0.95 * expected.nbytes <= gone <= 1.05 * expected.nbytes
    assert torch.equal(weights["first"], expected)


def test_memory_that_is_no_file_stays() -> None:
    tensor = torch.ones(SHAPE)
    let_go_of_file_pages(tensor)
    assert (tensor == 1).all()


def test_memory_counts_when_it_is_touched_and_outlives_who_asked_for_it() -> None:
    memory = untouched_memory(1 << 30)
    assert resident_bytes(memory) < 1 << 24
    part = memory[: 1 << 26].view(torch.float32)
    del memory
    part.fill_(7)
    assert (1 << 26) <= resident_bytes(part) < (1 << 26) + (1 << 24)
    assert (part == 7).all()


def test_no_memory_at_all() -> None:
    assert untouched_memory(0).shape == (0,)
