"""Replicas in the simulator: the same router over real schedulers on virtual clocks."""

import json

import pytest

from inflight.contracts.api.config import ROUTINGS, EngineConfig
from inflight.simulate import Lengths, SimulatedRequest, StepCost, SyntheticLoad, simulate, simulate_replicas
from tests.command import Command

COST = StepCost.parse('{"fixed": 0.01, "per_token": 0.001}')
CONFIG = EngineConfig(max_num_seqs=16, num_blocks=700, max_model_len=2000, seed=1)
PREFIXES = SyntheticLoad(
    num_requests=400,
    rate=1.5,
    prompt_tokens=Lengths("fixed", 20),
    output_tokens=Lengths("fixed", 16),
    shared_prefix_tokens=1000,
    num_prefixes=20,
)
"""Twenty prefixes of 1,000 tokens, of which each cache holds ten."""


def test_prefixes_find_their_replica_and_first_tokens_come_in_half_the_time() -> None:
    reports = {routing: simulate_replicas(PREFIXES, CONFIG, COST, 4, routing) for routing in ROUTINGS}
    assert {each.num_sequences for each in reports.values()} == {400}
    by_prefix, in_turn = reports["prefix"], reports["round-robin"]
    assert by_prefix.hit_rate > 0.9
    assert in_turn.hit_rate < 0.6
    for other in ("round-robin", "least-loaded"):
        assert 2 * by_prefix.time_to_first_token.p50 < reports[other].time_to_first_token.p50


def test_without_shared_prefixes_no_replica_is_left_idle() -> None:
    load = SyntheticLoad(num_requests=300, rate=8.0, prompt_tokens=Lengths("exponential", 200), seed=2)
    by_prefix, loaded = (simulate_replicas(load, CONFIG, COST, 4, each) for each in ("prefix", "least-loaded"))
    assert by_prefix.time_to_first_token.p95 < 1.2 * loaded.time_to_first_token.p95
    assert by_prefix.seconds < 1.05 * loaded.seconds


def test_one_replica_is_one_engine() -> None:
    config = EngineConfig(max_num_seqs=16, num_blocks=700, max_prefill_tokens_per_step=64, max_model_len=2000)
    assert simulate_replicas(PREFIXES, config, COST, 1, "prefix") == simulate(PREFIXES, config, COST)


def test_the_same_run_is_simulated_twice() -> None:
    first, second = (simulate_replicas(PREFIXES, CONFIG, COST, 3, "prefix") for _ in range(2))
    assert first == second


def test_requests_that_are_out_of_order_are_refused() -> None:
    requests = [SimulatedRequest(str(time), time, [1, 2], (3,)) for time in (1.0, 0.5)]
    with pytest.raises(ValueError, match="out of order"):
        simulate_replicas(requests, CONFIG, COST, 2, "prefix")


def test_the_command_takes_replicas(command: Command) -> None:
    options = ["simulate", *["--synthetic", "--num-requests", "40", "--rate", "4", "--json", "--step-cost"]]
    options.append(json.dumps({"fixed": 0.01, "per_token": 0.001}))

    def seconds(*more: str) -> float:
        done = command(*options, *more)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["seconds"])

    assert seconds("--replicas", "3") < seconds()
    assert "cannot be given with --replicas" in command(*options, "--replicas", "2", "--record", "x").stderr
