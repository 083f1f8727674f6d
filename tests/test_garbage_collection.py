"""The garbage collector's state is restored after imports during which it is paused."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from inflight.host.garbage_collection import call_after, garbage_collection_paused


class PrefixNode:
    """Refers to itself, so only the collector can remove it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_inside_and_goes_on_afterwards() -> None:
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), garbage_collection_paused():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_its_owner_has_stopped_stays_stopped() -> None:
    gc.disable()
    with garbage_collection_paused():
        pass
    assert not gc.isenabled()


def test_garbage_that_was_there_is_still_found_later() -> None:
    found = weakref.ref(PrefixNode())
    with garbage_collection_paused():
        pass
    assert found() is not None
    gc.collect()
    assert found() is None


def test_what_its_owner_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() > 0  # some may die meanwhile


def test_what_is_called_after_an_object_may_take_any_lock() -> None:
    lock, called = threading.Lock(), threading.Event()

    def take() -> None:
        with lock:
            called.set()

    node = PrefixNode()
    call_after(node, take)
    with lock:  # as the thread may do that the collector comes in
        del node
        gc.collect()
    assert called.wait(60)


def test_what_fails_after_one_object_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    called, node, other = threading.Event(), PrefixNode(), PrefixNode()
    call_after(node, lambda: [].pop())
    del node
    gc.collect()
    call_after(other, called.set)
    del other
    gc.collect()
    assert called.wait(60)
    assert "pop from empty list" in caplog.text


def test_at_the_end_of_a_process_everything_is_called() -> None:
    code = (
        "import threading; from inflight.host.garbage_collection import call_after\n"
        "class Node: pass\n"
        "def say_late(): threading.main_thread().join(); print('gone', flush=True)\n"
        "gone, there = Node(), Node()\n"
        "call_after(there, lambda: print('there', flush=True)); call_after(gone, say_late); del gone"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "gone\nthere\n"
