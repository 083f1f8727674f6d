"""The store's thread: saved blocks are loaded, and any failure costs only a recomputation."""

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.contracts.step.block_hash import Root, block_hash
from inflight.prefix_store import BlockFolder, PrefixStore, block_file
from inflight.scheduling.persistence import BlockContent, Loading

NUM_BLOCKS, SIZE = 8, 1000
LONG = 60.0


class Memory:
    """A cache of a few blocks, in two pieces each."""

    def __init__(self) -> None:
        self.blocks = [[bytearray(os.urandom(SIZE)), bytearray(os.urandom(SIZE))] for _ in range(NUM_BLOCKS)]

    def rows(self, block: int) -> list[memoryview]:
        return [memoryview(each) for each in self.blocks[block]]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def store(tmp_path: Path, memory: Memory) -> Iterator[PrefixStore]:
    store = PrefixStore(BlockFolder(tmp_path, b"f" * 32, 10**6), memory.rows)
    yield store
    store.close()


def contents(number: int) -> list[BlockContent]:
    parent, chain = Root().block_hash, []
    for each in range(number):
        token_ids = bytes([each] * 64)
        own = block_hash(parent, token_ids)
        chain.append(BlockContent(own, parent, token_ids, 0))
        parent = own
    return chain


def save(store: PrefixStore, chain: list[BlockContent], is_current: Callable[[], bool] = lambda: True) -> None:
    for block, content in enumerate(chain):
        store.save(content, block, is_current)
    store.flush(LONG)


def load(store: PrefixStore, chain: list[BlockContent], first: int = 4) -> Loading:
    loading = store.load([(content, first + number) for number, content in enumerate(chain)])
    while not loading.is_done:
        store.wait(LONG)
    return loading


def test_what_was_saved_comes_back(store: PrefixStore, memory: Memory, tmp_path: Path) -> None:
    chain = contents(4)
    assert not store.has(chain[0].block_hash, 0)
    save(store, chain)
    assert [store.has(content.block_hash, 0) for content in chain] == [True] * 4
    assert not store.has(chain[0].block_hash, 1)
    assert load(store, chain).num_loaded == 4
    assert memory.blocks[4:] == memory.blocks[:4]
    another = Memory()
    later = PrefixStore(BlockFolder(tmp_path, b"f" * 32, 10**6), another.rows)
    assert load(later, contents(4)).num_loaded == 4
    assert another.blocks[4:] == memory.blocks[:4]
    later.close()


def test_memory_is_made_ready_for_as_many_blocks_as_there_are(
    store: PrefixStore, memory: Memory, tmp_path: Path
) -> None:
    save(store, contents(3))
    touched: list[int] = []
    ready = threading.Event()

    def touch(row: memoryview) -> None:
        touched.append(row.nbytes)
        if len(touched) == 6:
            ready.set()

    folder = BlockFolder(tmp_path, b"f" * 32, 10**6)
    later = PrefixStore(folder, memory.rows, num_blocks=NUM_BLOCKS, touch=touch)
    assert ready.wait(LONG)
    later.close()
    assert touched == [SIZE] * 6


def test_another_fingerprint_finds_nothing(store: PrefixStore, memory: Memory, tmp_path: Path) -> None:
    save(store, contents(4))
    other = PrefixStore(BlockFolder(tmp_path, b"g" * 32, 10**6), memory.rows)
    assert not any(other.has(content.block_hash, 0) for content in (*contents(4), *contents(4)))
    other.close()


def test_loading_ends_at_the_first_block_that_cannot_be_had(
    store: PrefixStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = contents(4)
    save(store, chain)
    path = store._folder.path_of(chain[2].block_hash, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with caplog.at_level(logging.WARNING):
        assert load(store, chain).num_loaded == 2
    (line,) = caplog.messages
    assert f"{path} is damaged; it is deleted" in line
    assert not path.exists()
    path = store._folder.path_of(chain[1].block_hash, 0)
    path.unlink()
    caplog.clear()
    assert load(store, chain).num_loaded == 1
    assert caplog.messages == []  # others may delete what they like


def test_a_block_that_was_taken_for_something_else_is_not_saved(store: PrefixStore) -> None:
    chain = contents(4)
    save(store, chain, lambda: False)
    assert not any(store.has(content.block_hash, 0) for content in chain)
    answers = iter([True, False])
    save(store, chain[:1], lambda: next(answers))
    assert not store.has(chain[0].block_hash, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_fails_costs_one_line_each_and_then_none(
    store: PrefixStore, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = contents(4)
    save(store, chain[:2])

    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(block_file, "write", fail)
    monkeypatch.setattr(block_file, "read", fail)
    for _ in range(10):
        save(store, chain[2:])
        assert load(store, chain[:2]).num_loaded == 0
    assert sum("cannot be saved" in line for line in caplog.messages) == 10
    assert sum("cannot be read" in line for line in caplog.messages) == 10
    assert caplog.messages[-1].endswith("there will be no more such lines")
    monkeypatch.undo()
    save(store, chain)
    assert load(store, chain).num_loaded == 4


def test_a_folder_that_vanishes_is_made_again(store: PrefixStore, tmp_path: Path) -> None:
    chain = contents(4)
    save(store, chain)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    tmp_path.rmdir()
    assert load(store, chain).num_loaded == 0
    save(store, chain)
    assert load(store, chain).num_loaded == 4


def test_nothing_is_loaded_where_computing_is_faster(store: PrefixStore) -> None:
    assert store.is_faster(100, 0, 1)
    store.observe_prefill(1000, 1.0)
    assert store.is_faster(1, 0, 16)
    store.observe_prefill(10**9, 1e-3)
    for _ in range(200):
        store.observe_prefill(10**9, 1e-3)
    assert not store.is_faster(1, 0, 16)


@pytest.mark.parametrize("seconds", [0.0, LONG])
def test_closing_saves_what_waits(seconds: float, tmp_path: Path, memory: Memory) -> None:
    store = PrefixStore(BlockFolder(tmp_path, b"f" * 32, 10**6), memory.rows, seconds)
    store.is_busy = True  # so that it has to wait for leisure
    chain = contents(NUM_BLOCKS)
    for block, content in enumerate(chain):
        store.save(content, block, lambda: True)
    store.close()
    store.close()
    assert not store._thread.is_alive()
    assert seconds == 0 or all(store.has(content.block_hash, 0) for content in chain)


def test_the_thread_itself_may_be_told_to_end(store: PrefixStore) -> None:
    """A garbage collector runs in any thread."""
    chain = contents(1)

    def is_current() -> bool:
        store.end()
        return True

    store.save(chain[0], 0, is_current)
    store._thread.join()
    assert store.has(chain[0].block_hash, 0)


def test_the_cache_is_let_go_before_the_end_is_over(tmp_path: Path) -> None:
    """`close` waits for the thread. If the thread freed memory of the cache later, while the process exits, it would
    crash the process."""
    memory = Memory()
    store = PrefixStore(BlockFolder(tmp_path, b"f" * 32, 10**6), memory.rows)
    reference = weakref.ref(memory)
    del memory
    assert reference() is not None
    store.close()
    assert reference() is None
