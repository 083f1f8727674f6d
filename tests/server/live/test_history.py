"""The last hour: what is counted, for how long it is kept, and how right its percentiles are."""

import random
from dataclasses import dataclass

import pytest

from inflight.contracts.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.live.history import NUM_PIECES, SECONDS, Latencies, LoadHistory


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_percentiles_are_right_within_five_percent() -> None:
    rng = random.Random(3)
    seconds = sorted(rng.lognormvariate(-3, 2) for _ in range(5000))
    latencies = Latencies()
    for each in seconds:
        latencies.count(each)
    for share in (0.01, 0.5, 0.9, 0.99):
        found = latencies.percentile(share)
        assert found == pytest.approx(seconds[int(share * len(seconds)) - 1], rel=0.06)
    assert Latencies().percentile(0.5) is None
    for extreme in (0.0, 1e-9, 1e9):
        latencies.count(extreme)


def test_latencies_of_several_pieces_add_up() -> None:
    whole, parts = Latencies(), [Latencies(), Latencies()]
    for number in range(1, 200):
        whole.count(number / 100, number=2)
        parts[number % 2].count(number / 100, number=2)
    parts[0].add(parts[1])
    assert parts[0].number == whole.number == 398
    assert parts[0].percentile(0.7) == whole.percentile(0.7)


def output_of(num_prompt_tokens: int) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=0.0)
    return RequestOutput("a", None, [1] * num_prompt_tokens, [CompletionOutput(0, "", [1])], metrics=metrics)


def test_requests_are_counted_in_the_piece_in_which_things_happen() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.started("a", 1, SamplingParams())
    clock.now += 2
    history.produced("a", 1, clock.now)
    clock.now += SECONDS
    history.produced("a", 4, clock.now)
    history.started("b", 2, SamplingParams(n=2))
    history.finished("a", output_of(7), "stop")
    history.finished("b", None, "refused")
    history.finished("unknown", None, "error")
    history.produced("unknown", 3, clock.now)
    told = history.as_dict()
    assert told["num_started"] == [1, 1]
    assert told["num_output_tokens"] == [1, 4]
    assert told["num_prompt_tokens"] == [0, 7]
    assert (told["num_ended"], told["num_refused"], told["num_failed"]) == ([0, 1], [0, 1], [0, 1])
    assert told["most_running"] == [1, 2]
    assert told["to_first_token"][0] == pytest.approx([2.0] * 3, rel=0.06)
    assert told["to_first_token"][1] == [None] * 3
    assert told["between_tokens"][1] == pytest.approx([SECONDS / 4] * 3, rel=0.06)
    assert told["whole"]["between_tokens"] == told["between_tokens"][1]
    assert history.recent()["between_tokens"] == told["between_tokens"][1]
    clock.now += 3 * SECONDS
    assert history.recent() == {"to_first_token": [None] * 3, "between_tokens": [None] * 3}


def test_tokens_of_several_sequences_are_as_far_apart_as_those_of_each() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.started("a", 4, SamplingParams(n=4))
    history.produced("a", 4, clock.now)
    for _ in range(5):
        clock.now += 0.5
        history.produced("a", 4, clock.now)
    assert history.recent()["between_tokens"] == pytest.approx([0.5] * 3, rel=0.06)


def test_nothing_older_than_an_hour_is_kept() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    for _ in range(2 * NUM_PIECES):
        history.started("a", 1, SamplingParams())
        history.finished("a", output_of(1), "length")
        clock.now += SECONDS
    told = history.as_dict()
    assert len(told["age"]) == NUM_PIECES
    assert max(told["age"]) <= (NUM_PIECES + 1) * SECONDS
    clock.now += 3600
    history.started("b", 1, SamplingParams())
    assert history.as_dict()["num_started"] == [1]
