"""The garbage collector is as it was, whatever is imported while it rests."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from inflight.garbage_collection import garbage_collection_paused


class Node:
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
    found = weakref.ref(Node())
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
