"""Pages of a mapped file are released and their content remains; no other memory changes. Untouched memory takes no
pages."""

import os
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.execution.mapped_memory import populate, release_file_pages, untouched_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only done on Linux")
SHAPE = (1024, 4096)  # 16 MiB


def resident_bytes(tensor: torch.Tensor) -> int:
    """The number of bytes of a tensor that are resident in memory."""
    page_size = os.sysconf("SC_PAGE_SIZE")
    first, last = tensor.data_ptr() // page_size, (tensor.data_ptr() + tensor.nbytes - 1) // page_size
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = numpy.fromfile(pages, numpy.uint64, last + 1 - first)
    return int((entries >> 63).sum()) * page_size


@pytest.mark.parametrize("transposed", [False, True])
def test_pages_of_a_file_are_released_and_return_when_they_are_read(tmp_path: Path, transposed: bool) -> None:
    expected = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    save_file({"first": expected, "second": -expected}, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["first"], expected)
    assert torch.equal(weights["second"], -expected)
    before = resident_bytes(weights["first"])
    release_file_pages(weights["first"].T if transposed else weights["first"])
    gone = before - resident_bytes(weights["first"])
    assert 0.95 * expected.nbytes <= gone <= 1.05 * expected.nbytes
    assert torch.equal(weights["first"], expected)


def test_memory_without_a_file_is_kept() -> None:
    tensor = torch.ones(SHAPE)
    release_file_pages(tensor)
    assert (tensor == 1).all()


def test_memory_is_resident_once_touched_and_outlives_its_first_owner() -> None:
    memory = untouched_memory(1 << 30)
    assert resident_bytes(memory) < 1 << 24
    part = memory[: 1 << 26].view(torch.float32)
    del memory
    part.fill_(7)
    assert (1 << 26) <= resident_bytes(part) < (1 << 26) + (1 << 24)
    assert (part == 7).all()


def test_memory_can_be_taken_before_it_is_needed_and_keeps_what_is_in_it() -> None:
    memory = untouched_memory(1 << 26)
    memory[12_345] = 7
    populate(memory[10_000 : 1 << 25].numpy().data)
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        assert resident_bytes(memory[10_000 : 1 << 25]) >= (1 << 25) - 10_000
    assert memory[12_345] == 7
    assert memory.sum() == 7


def test_untouched_memory_may_be_empty() -> None:
    assert untouched_memory(0).shape == (0,)
