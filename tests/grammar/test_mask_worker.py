"""The masks of a step, computed in parallel with it."""

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLExecutor

from inflight.grammar import GrammarMatcher, MaskWorker
from inflight.grammar.matcher import fill_masks
from tests.grammar.helpers import NUM_PADDING, TOKENIZERS, WIDE, ids, matcher, spelled, write

BYTE_LEVEL = TOKENIZERS["byte_level"]
VOCAB_SIZE = BYTE_LEVEL.vocab_size + NUM_PADDING


@pytest.fixture
def worker():
    worker = MaskWorker(VOCAB_SIZE, num_threads=2)
    yield worker
    worker.stop()


def alone(matcher: GrammarMatcher) -> list[int]:
    words = np.empty(-(-VOCAB_SIZE // 32), dtype=np.int32)
    matcher.fill_mask(words)
    return ids(words)


def test_each_row_has_the_mask_of_its_sequence(worker: MaskWorker) -> None:
    texts = [chr(ord("a") + number) for number in range(26)]
    matchers = [matcher(BYTE_LEVEL, choice=(text,)) for text in texts]
    masks = worker.start(matchers).result()
    assert masks.words.shape == (26, -(-VOCAB_SIZE // 32))
    assert masks.words.dtype == np.int32
    assert [ids(row) for row in masks.words] == [spelled(BYTE_LEVEL, text) for text in texts]
    assert masks.errors == {}


def test_steps_with_no_and_with_one_constrained_sequence(worker: MaskWorker) -> None:
    assert worker.start([]).result().words.shape == (0, -(-VOCAB_SIZE // 32))
    here = matcher(BYTE_LEVEL, json_object=True)
    assert ids(worker.start([here]).result().words[0]) == alone(here)


def test_masks_are_correct_over_several_steps(worker: MaskWorker) -> None:
    start = matcher(BYTE_LEVEL, json_object=True)
    matchers = [start.clone() for _ in range(4)]
    texts = ['{"a": 1}', "{}", '{"b": [null]}', '{"ä": ""}']
    tokens = [spelled(BYTE_LEVEL, text) for text in texts]
    for step in range(max(map(len, tokens))):
        running = [(each, line[step]) for each, line in zip(matchers, tokens, strict=True) if step < len(line)]
        masks = worker.start([each for each, _ in running]).result()
        for row, (each, token_id) in enumerate(running):
            assert ids(masks.words[row]) == alone(each.clone())
            assert token_id in ids(masks.words[row])
            assert each.accept(token_id)
    assert all(each.is_finished for each in matchers)


def test_an_error_affects_only_its_own_sequence(worker: MaskWorker) -> None:
    too_complex = matcher(BYTE_LEVEL, grammar=WIDE)
    assert write(too_complex, BYTE_LEVEL, "(") == 0
    good = [matcher(BYTE_LEVEL, regex="a+") for _ in range(2)]
    masks = worker.start([good[0], too_complex, good[1]]).result()
    assert list(masks.errors) == [1]
    assert "cannot be followed any further" in str(masks.errors[1])
    assert [ids(row) for row in masks.words] == [spelled(BYTE_LEVEL, "a"), [], spelled(BYTE_LEVEL, "a")]
    assert worker.start(good).result().errors == {}


def test_other_python_threads_run_while_masks_are_computed() -> None:
    """The interpreter lock is released while masks are computed, so a waiting thread gets it, although no thread is
    forced to release it (the switch interval is far longer than the test). Sometimes the thread may come too late."""
    start, executor = matcher(BYTE_LEVEL, json_object=True), LLExecutor(1)
    words = np.empty((200, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        assert any(
            _got_in_between(lambda: fill_masks([start.clone() for _ in words], words, executor)) for _ in range(100)
        )
        assert not _got_in_between(lambda: sum(range(10**6))), "nor does anything else let it in"
    finally:
        sys.setswitchinterval(interval)


def _got_in_between(work: Callable[[], object]) -> bool:
    """Whether another thread, woken just before the work, ran before the work was done."""
    gate, has_run = threading.Event(), []

    def run() -> None:
        gate.wait()
        has_run.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    gate.set()
    work()
    got_in_between = bool(has_run)
    thread.join()
    return got_in_between
