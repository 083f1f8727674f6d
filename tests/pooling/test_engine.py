"""Which texts run in a step, and how requests end."""

from unittest import mock

import pytest

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import InvalidRequestError, QueueFullError
from inflight.contracts.pooling import PooledText, PoolingPlan
from inflight.engine.pooling import PoolingEngine
from tests.pooling.checkpoints import draw_ids, make_model


@pytest.fixture
def engine() -> PoolingEngine:
    return PoolingEngine(make_model("bert"), EngineConfig(max_num_batched_tokens=20), PoolingPlan("embed"))


def texts_of(*lengths: int) -> list[PooledText]:
    return [PooledText(ids) for ids in draw_ids(*lengths)]


def steps_of(engine: PoolingEngine) -> list[list[int]]:
    """Run all requests to their end; return the lengths of the texts of each step."""
    steps: list[list[int]] = []
    run = engine._runner.run

    def watch(texts: list[PooledText]) -> object:
        steps.append([len(text.token_ids) for text in texts])
        return run(texts)

    with mock.patch.object(engine._runner, "run", watch):
        while engine.has_unfinished_requests:
            engine.step()
    return steps


def test_a_step_has_whole_texts_up_to_the_budget(engine: PoolingEngine) -> None:
    engine.submit("a", texts_of(8, 8, 8, 20, 1, 1))
    assert steps_of(engine) == [[8, 8], [8], [20], [1, 1]]


def test_a_text_beyond_the_budget_runs_alone(engine: PoolingEngine) -> None:
    engine.submit("a", texts_of(3, 100, 4))
    assert steps_of(engine) == [[3], [100], [4]]


def test_requests_take_turns(engine: PoolingEngine) -> None:
    """A request of one text does not wait for one of many."""
    engine.submit("many", texts_of(*[10] * 5))
    engine.submit("one", texts_of(7))
    engine.submit("two", texts_of(9, 9))
    assert steps_of(engine) == [[10, 7], [9, 10], [9, 10], [10, 10]]


def test_values_are_those_of_the_request(engine: PoolingEngine) -> None:
    first, second = texts_of(5, 9, 14), texts_of(11, 2)
    engine.submit("first", first)
    engine.submit("second", second)
    ended = [request_id for _ in range(4) for request_id in engine.step()]
    assert sorted(ended) == ["first", "second"]
    for request_id, texts in (("first", first), ("second", second)):
        request = engine.take(request_id)
        assert request is not None
        assert request.values == [engine._runner.run([text])[0] for text in texts]
    assert not engine.has_unfinished_requests


def test_an_error_ends_the_requests_of_its_step_and_no_others(engine: PoolingEngine) -> None:
    engine.submit("first", texts_of(20))
    engine.submit("second", texts_of(20))
    with mock.patch.object(engine._runner, "run", side_effect=RuntimeError("broken")):
        assert engine.step() == ["first"]
    first = engine.take("first")
    assert first is not None
    assert first.values == []
    assert first.error == "RuntimeError('broken')"
    assert engine.step() == ["second"]


def test_an_aborted_request_does_not_run(engine: PoolingEngine) -> None:
    engine.submit("a", texts_of(5))
    engine.abort("a")
    assert not engine.has_unfinished_requests
    assert engine.step() == []


def test_what_cannot_run_is_refused(engine: PoolingEngine) -> None:
    with pytest.raises(InvalidRequestError, match="has 200 tokens, not 1 to 160"):
        engine.submit("a", texts_of(200))
    with pytest.raises(InvalidRequestError, match="out of range; this model has 256 tokens"):
        engine.submit("a", [PooledText([256])])
    assert not engine.has_unfinished_requests


def test_a_full_queue_refuses() -> None:
    engine = PoolingEngine(make_model("bert"), EngineConfig(max_num_waiting=2), PoolingPlan("embed"))
    engine.submit("a", texts_of(5, 5))
    with pytest.raises(QueueFullError, match="2 texts wait already"):
        engine.submit("b", texts_of(1))


def test_stats_count_texts_and_tokens(engine: PoolingEngine) -> None:
    engine.submit("a", texts_of(8, 8, 8))
    assert engine.stats().num_waiting == 3
    steps_of(engine)
    stats = engine.stats()
    assert (stats.num_requests, stats.num_steps, stats.num_step_tokens, stats.num_waiting) == (1, 2, 24, 0)
