"""Weights in memory that several processes share: found by content, written once, never changed."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from inflight.execution import mapped_memory
from inflight.execution.mapped_memory import ALIGNMENT, SharedFile, share_through, shared

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(mapped_memory, "_of_process", None)
    file = os.memfd_create("test")
    yield file
    os.close(file)


def weight(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def num_pieces(file: int) -> int:
    return os.fstat(file).st_size // ALIGNMENT - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_equal_weights_are_written_once_and_read_alike(file: int, dtype: torch.dtype) -> None:
    for process in range(3):
        share_through(file)
        for seed in range(2):
            given = weight(seed, 3, 40, 1000, dtype=dtype)
            found = shared(given)
            assert found.data_ptr() != given.data_ptr()
            assert (found.dtype, found.shape) == (given.dtype, given.shape)
            assert torch.equal(found, given), process
    assert num_pieces(file) == 2


def test_what_one_process_writes_no_other_sees(file: int) -> None:
    share_through(file)
    first, second = shared(weight(0, 40_000)), shared(weight(0, 40_000))
    first.zero_()
    assert torch.equal(second, weight(0, 40_000))
    assert torch.equal(shared(weight(0, 40_000)), weight(0, 40_000))
    assert num_pieces(file) == 1


def test_without_a_file_and_for_small_or_scattered_weights_nothing_changes(file: int) -> None:
    large = weight(0, 40_000)
    assert shared(large) is large
    share_through(file)
    for given in (weight(0, 10), weight(0, 400, 400).T):
        assert shared(given) is given
    assert num_pieces(file) == 0
    mapped = shared(large)
    assert shared(mapped) is mapped  # it lies in a file already


def test_a_full_index_leaves_weights_where_they_are(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = mapped_memory.COUNT.size + 2 * mapped_memory.ENTRY.size
    share_through(file)
    for seed in range(2):
        shared(weight(seed, 40_000))
    monkeypatch.setattr(mapped_memory, "INDEX_BYTES", room)
    given = weight(2, 40_000)
    assert shared(given) is given
    assert shared(weight(1, 40_000)).data_ptr() != 0


def test_a_process_that_dies_while_it_writes_leaves_the_others_all_that_is_whole(file: int) -> None:
    """The process is killed while it holds the lock, in the middle of writing a piece."""
    script = (
        "import os, signal, sys, torch\n"
        "from inflight.execution import mapped_memory\n"
        "from tests.execution.test_shared_memory import weight\n"
        "file = int(sys.argv[1])\n"
        "mapped_memory.share_through(file)\n"
        "mapped_memory.shared(weight(0, 40_000))\n"
        "class Dying:\n"
        "    def pack_into(self, *_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    size = mapped_memory.ENTRY.size\n"
        "mapped_memory.ENTRY = Dying()\n"
        "mapped_memory.shared(weight(1, 40_000))\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(file)], pass_fds=(file,))
    assert died.returncode < 0
    assert num_pieces(file) == 2
    mine = SharedFile(file)
    for seed in range(3):
        content = weight(seed, 40_000).view(torch.uint8)
        found = mine.share(content)
        assert found is not None
        assert torch.equal(found, content)
    assert len(mine._places) == 3
    assert num_pieces(file) == 4  # what the dead one had begun is never used
