"""Live states of a running engine: they cover all computation, and an engine without a reader records nothing."""

from pathlib import Path
from typing import Any

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.live import LiveState
from inflight.contracts.step.record import RecordTo, StepRecord
from inflight.engine import live_feed
from inflight.engine.engine import Engine
from inflight.engine.live_feed import LiveFeed
from inflight.observe.recorder import read_recording
from tests import zoo


def make_engine(**options: Any) -> Engine:
    return Engine(zoo.build("llama"), EngineConfig(**options))


def submit(engine: Engine, request_id: str, prompt: list[int], **params: Any) -> None:
    engine.submit(engine.inputs.accept(request_id, prompt, SamplingParams(temperature=0, **params)))


def looks_at(engine: Engine, feed: LiveFeed, every: int) -> list[LiveState]:
    """Run to the end, and read a live state after every few steps."""
    states = [feed.look()]
    while engine.has_unfinished_requests:
        for _ in range(every):
            engine.step()
        states.append(feed.look())
    return states


@pytest.mark.parametrize("every", [1, 3, 1000])
def test_all_that_was_computed_is_in_one_look(every: int) -> None:
    engine, records = make_engine(max_num_seqs=2, max_num_batched_tokens=16), list[StepRecord]()
    engine.observer = records.append
    feed = LiveFeed(engine)
    for number in range(5):
        submit(engine, str(number), [number + 1, 7] * 15, max_tokens=20)
    states = looks_at(engine, feed, every)
    computed = sum(sum(work[3:]) for state in states for work in state.work)
    assert computed == sum(record.num_tokens for record in records)
    accepted = sum(work.num_accepted for state in states for work in state.work)
    rejected = sum(work.num_rejected for state in states for work in state.work)
    assert accepted == engine.stats().num_accepted_tokens > 0
    assert accepted + rejected == engine.stats().num_draft_tokens
    decoded = sum(work.num_decoded for state in states for work in state.work)
    assert decoded == sum(s.length - s.num_draft_tokens for r in records for s in r.spans if s.kind == "decode")
    assert sum(state.num_steps for state in states) == len(records)
    assert all(len(state.steps) <= live_feed.MOST_STEPS for state in states)
    assert not any(step.arrivals for state in states for step in state.steps)
    last = states[-1]
    assert (last.running, last.waiting, last.stats.num_requests) == ((), (), 5)


def test_a_look_shows_slots_queue_and_blocks_as_they_are() -> None:
    engine = make_engine(max_num_seqs=2, enable_prefix_caching=True, block_size=4)
    feed = LiveFeed(engine)
    for number in range(5):
        submit(engine, str(number), [9] * 12, max_tokens=6, ignore_eos=True)
    engine.step()
    state = feed.look()
    assert [(each.request_id, each.slot) for each in state.running] == [("0", 0), ("1", 1)]
    assert [each.request_id for each in state.waiting] == ["2", "3", "4"]
    assert all(each.slot is None and each.num_computed_tokens == 0 for each in state.waiting)
    assert [each.num_prompt_tokens for each in state.running] == [12, 12]
    assert state.blocks is not None
    pool = engine.scheduler.block_pool
    assert len(state.blocks) == pool.num_blocks
    assert sum(each > 1 for each in state.blocks) == state.stats.num_blocks_used
    assert sum(each == 1 for each in state.blocks) == state.stats.num_blocks_cached
    for block, shown in enumerate(state.blocks):
        assert shown == 0 or pool.num_holders(block) == max(0, shown - 1)
    assert feed.look().blocks is None  # so soon after
    renamed = state.renamed({"0": "mine", "3": "yours"})
    assert [each.request_id for each in renamed.running] == ["mine", "1"]
    assert [each.request_id for each in renamed.waiting] == ["2", "yours", "4"]


def test_two_that_share_a_prefix_share_its_blocks() -> None:
    engine = make_engine(max_num_seqs=2, block_size=4)
    feed = LiveFeed(engine)
    submit(engine, "first", [5, 6, 7, 8] * 4, max_tokens=30, ignore_eos=True)
    engine.step()
    submit(engine, "second", [5, 6, 7, 8] * 4, max_tokens=30, ignore_eos=True)
    engine.step()
    blocks = feed.look().blocks
    assert blocks is not None
    assert sum(each == 3 for each in blocks) == 4  # all of the prompt
    assert max(blocks) == 3


def test_a_watcher_that_asks_no_more_has_gone(tmp_path: Path) -> None:
    now = 0.0
    engine = make_engine(max_num_seqs=2)
    feed = LiveFeed(engine, clock=lambda: now)
    assert engine.observer is None
    path = tmp_path / "steps.jsonl"
    submit(engine, "a", [1] * 5, max_tokens=30, ignore_eos=True)
    feed.look(RecordTo(path=str(path)))
    assert engine.observer is not None
    now = -1e9  # long ago, on the clock by which steps are timed
    feed.look()
    engine.step()
    assert engine.observer is None
    engine.step()
    (step,) = read_recording(path).steps  # what was seen until then is written
    assert step.num_tokens == 5


def test_what_was_not_watched_is_not_taken_for_a_preemption() -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=6, block_size=4, enable_prefix_caching=False)
    feed = LiveFeed(engine)
    submit(engine, "long", [1] * 6, max_tokens=12, ignore_eos=True)
    submit(engine, "other", [2] * 6, max_tokens=12, ignore_eos=True)
    feed.look()
    for _ in range(2):
        engine.step()
    feed.close()
    while not engine.scheduler.count.preemptions:
        engine.step()
    feed.look()
    before, num_seen = engine.scheduler.count.preemptions, 0
    while engine.has_unfinished_requests:
        engine.step()
        num_seen += feed.look().num_preempted
    assert num_seen == engine.scheduler.count.preemptions - before


def test_a_long_queue_is_put_in_order_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "LONG_QUEUE", 3)
    monkeypatch.setattr(live_feed, "MOST_WAITING", 2)
    now = 10.0
    engine = make_engine(max_num_seqs=1)
    feed = LiveFeed(engine, clock=lambda: now)
    for number in range(6):
        submit(engine, str(number), [number + 1] * 4, max_tokens=1)
    assert [each.request_id for each in feed.look().waiting] == ["0", "1"]
    engine.step()
    assert [each.request_id for each in feed.look().waiting] == ["0", "1"]
    now += 1.0
    assert [each.request_id for each in feed.look().waiting] == ["1", "2"]
    for _ in range(3):
        engine.step()
    assert [each.request_id for each in feed.look().waiting] == ["4", "5"]
