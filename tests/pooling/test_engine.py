"""Which texts run in a step, and how their requests end."""

from unittest import mock

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import InvalidRequestError, QueueFullError
from inflight.contracts.api.params import DEFAULT_PARAMS
from inflight.contracts.api.pooling import PooledText, PoolingPlan
from inflight.contracts.step.record import StepRecord
from tests.pooling.checkpoints import TextRunner, draw_ids, make_model


@pytest.fixture
def runner() -> TextRunner:
    return TextRunner(make_model("bert"), EngineConfig(max_num_batched_tokens=20), PoolingPlan("embed"))


def texts_of(*lengths: int) -> list[PooledText]:
    return [PooledText(ids) for ids in draw_ids(*lengths)]


def steps_of(runner: TextRunner, *lengths: int) -> list[list[int]]:
    """The lengths of the texts of each step."""
    records: list[StepRecord] = []
    runner.engine.observer = records.append
    runner.run(texts_of(*lengths))
    return [[span.length for span in record.spans] for record in records]


def test_a_step_has_whole_texts_up_to_the_budget(runner: TextRunner) -> None:
    assert steps_of(runner, 8, 8, 8, 20, 1, 1) == [[8, 8], [8], [20], [1, 1]]


def test_a_text_beyond_the_budget_runs_alone(runner: TextRunner) -> None:
    assert steps_of(runner, 3, 100, 4) == [[3], [100], [4]]


def test_an_error_ends_the_texts_of_its_step_and_no_others(runner: TextRunner) -> None:
    first, second = runner.submit(*texts_of(20, 20))
    with mock.patch.object(runner.engine.runner, "run", side_effect=RuntimeError("broken")):
        (failed,) = runner.engine.step()
    assert (failed.request_id, failed.finish_reason, failed.error) == (first, "error", "RuntimeError('broken')")
    (output,) = runner.engine.step()
    assert (output.request_id, output.finish_reason, output.error) == (second, "stop", None)


def test_an_aborted_text_does_not_run(runner: TextRunner) -> None:
    (name,) = runner.submit(*texts_of(5))
    (output,) = runner.engine.abort(name)
    assert output.finish_reason == "abort"
    assert runner.engine.step() == []


def test_what_cannot_run_is_refused(runner: TextRunner) -> None:
    with pytest.raises(InvalidRequestError, match="has 200 tokens, not 1 to 160"):
        runner.submit(*texts_of(200))
    with pytest.raises(InvalidRequestError, match="token id 256; the model's vocabulary has the ids from 0 to 255"):
        runner.submit(PooledText([256]))
    with pytest.raises(InvalidRequestError, match="does not generate text"):
        runner.engine.inputs.accept("a", [1], DEFAULT_PARAMS)
    assert not runner.engine.has_unfinished_requests


def test_a_full_queue_refuses() -> None:
    runner = TextRunner(make_model("bert"), EngineConfig(max_num_waiting=2), PoolingPlan("embed"))
    runner.submit(*texts_of(5, 5))
    with pytest.raises(QueueFullError, match="2 sequences wait already"):
        runner.submit(*texts_of(1))


def test_stats_count_texts_and_tokens(runner: TextRunner) -> None:
    runner.submit(*texts_of(8, 8, 8))
    assert runner.engine.stats().num_waiting == 3
    while runner.engine.has_unfinished_requests:
        runner.engine.step()
    stats = runner.engine.stats()
    assert (stats.num_requests, stats.num_steps, stats.num_step_tokens, stats.num_waiting) == (3, 2, 24, 0)
