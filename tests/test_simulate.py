"""The simulator takes the engine's steps on a consistent virtual clock, with step costs that can be fitted."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.plan import Span, StepPlan
from inflight.contracts.step.record import StepRecord
from inflight.observe.recorder import Recorder, Recording, read_recording
from inflight.observe.run_report import Percentiles, RunLog, RunReport, report_of
from inflight.simulate import (
    AcceptanceRate,
    Lengths,
    SimulatedRequest,
    StepCost,
    SyntheticLoad,
    fit_cost,
    replay,
    simulate,
)
from inflight.simulate.simulated_engine import load_of_plan
from inflight.simulate.simulator import Simulation
from inflight.simulate.step_cost import StepLoad, choose_knots, load_of, timed_steps
from tests import others, zoo
from tests.observe.recordings import NUM_TOKENS, PROMPTS, TIGHT, run_recorded

COST = StepCost.linear(fixed=0.01, per_token=0.001)
LOOSE: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 64, "block_size": 4}


def made_of(prompts: Iterable[list[int]], outputs: Iterable[int], gap: float = 0.0) -> list[SimulatedRequest]:
    pairs = enumerate(zip(prompts, outputs, strict=True))
    return [SimulatedRequest(f"<{number}>", number * gap, prompt, (count,)) for number, (prompt, count) in pairs]


def run(
    requests: Iterable[SimulatedRequest], cost: StepCost = COST, **options: Any
) -> tuple[RunReport, list[StepRecord]]:
    records: list[StepRecord] = []
    report = simulate(requests, EngineConfig(**options or LOOSE), cost, observer=records.append)
    return report, records


def flat(report: RunReport) -> dict[str, float]:
    return {
        f"{name} {part}": number
        for name, value in report.as_dict().items()
        for part, number in (value.items() if isinstance(value, dict) else [("", value)])
    }


# ------------------------------------------------------------------------------------------- the engine's own steps


@pytest.mark.parametrize(
    "options",
    [
        TIGHT,
        TIGHT | {"enable_prefix_caching": False},
        TIGHT | {"max_prefill_tokens_per_step": 3},
        TIGHT | {"policy": "priority", "aging_steps": 3},
        LOOSE,
        {"max_num_seqs": 2, "block_size": 1, "num_blocks": 50},
        {},
    ],
)
def test_the_simulator_takes_the_same_steps_as_the_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"prefix_retention": 0.0, **(options or {"max_num_seqs": 64})}  # which would depend on times
    records = run_recorded(tmp_path / "run", **options)
    recording = read_recording(tmp_path / "run")
    given: list[StepRecord] = []
    simulate(made_of(PROMPTS, NUM_TOKENS), recording.config, COST, observer=given.append)
    again: list[StepRecord] = []
    simulate(replay(recording), recording.config, COST, observer=again.append)
    for simulated in (given, again):
        assert [step.spans for step in simulated] == [step.spans for step in records]
        for name in ("preempted", "num_running", "num_waiting", "num_preemptions", "num_cached_tokens"):
            assert [getattr(step, name) for step in simulated] == [getattr(step, name) for step in records]
        for name in ("num_prompt_tokens", "num_blocks_used", "num_blocks"):
            assert [getattr(step, name) for step in simulated] == [getattr(step, name) for step in records]


def test_sequences_of_one_request_fork_as_in_the_engine(tmp_path: Path) -> None:
    records = run_recorded(tmp_path / "run", n=3, **TIGHT)
    recording = read_recording(tmp_path / "run")
    simulated: list[StepRecord] = []
    simulate(replay(recording), recording.config, COST, observer=simulated.append)
    assert [step.spans for step in simulated] == [step.spans for step in records]


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3_next", "bloom"])
def test_the_simulator_releases_and_shares_blocks_like_the_model(name: str, tmp_path: Path) -> None:
    """Windows and states matter: without the recorded model, the simulation counts other blocks."""
    model = zoo.build(name) if name in zoo.ARCHITECTURES else others.build(name)
    records = run_recorded(tmp_path / "run", model=model, **TIGHT | {"num_blocks": 36})
    recording = read_recording(tmp_path / "run")
    assert recording.model is not None
    simulated: list[StepRecord] = []
    simulate(replay(recording), recording.config, COST, model=recording.model, observer=simulated.append)
    assert [step.spans for step in simulated] == [step.spans for step in records]
    for each in ("preempted", "num_blocks_used", "num_cached_tokens"):
        assert [getattr(step, each) for step in simulated] == [getattr(step, each) for step in records]
    of_others: list[StepRecord] = []
    simulate(replay(recording), recording.config, COST, observer=of_others.append)
    assert ([step.num_blocks_used for step in of_others] == [step.num_blocks_used for step in records]) == (
        name in ("bloom", "qwen3_next")
    )


def test_sequences_of_one_request_may_have_different_numbers_of_tokens() -> None:
    report, records = run([SimulatedRequest("a", 0.0, [1, 2, 3], (5, 2, 9))])
    assert report.num_output_tokens == 16
    assert report.num_sequences == 3
    counts = [sum((s.index == index) and s.kind != "chunk" for r in records for s in r.spans) for index in range(3)]
    assert counts == [5, 2, 9]


def test_a_long_queue_is_handed_over_in_parts_without_changing_the_result() -> None:
    load = SyntheticLoad(num_requests=60, prompt_tokens=Lengths("uniform", 1, 30), output_tokens=Lengths("fixed", 7))
    config = EngineConfig(max_num_seqs=4, num_blocks=20, block_size=4, max_num_batched_tokens=16)
    simulation = Simulation(load, config, COST, None, None)
    scheduler = simulation.engine.scheduler
    most, submit = 0, scheduler.submit

    def counted(request: Any) -> None:
        nonlocal most
        submit(request)
        most = max(most, scheduler.num_waiting)

    scheduler.submit = counted  # type: ignore[method-assign]
    lazily = simulation.run()
    assert most <= 8
    assert lazily == simulate(load, config, COST, observer=lambda record: None)
    assert lazily.num_preemptions > 0


# --------------------------------------------------------------------------------------------------------- the clock


def test_virtual_time_adds_up() -> None:
    report, records = run(made_of([[1] * 10, [2] * 5], [3, 2]))
    assert report.seconds == pytest.approx(sum(record.duration for record in records))
    for before, after in pairwise(records):
        assert after.start_time == pytest.approx(before.start_time + before.duration)
    assert [record.duration for record in records] == pytest.approx([0.025, 0.012, 0.011])
    assert report.num_output_tokens == 5
    assert report.time_to_first_token.p50 == pytest.approx(0.025)
    assert report.time_per_output_token.p99 == pytest.approx(0.012, rel=0.05)
    assert report.latency.p99 == pytest.approx(0.048, rel=0.01)
    assert report.occupancy == pytest.approx(5 / 12)
    assert report.output_tokens_per_second == pytest.approx(5 / 0.048)
    assert report.total_tokens_per_second == pytest.approx(20 / 0.048)


def test_a_request_is_not_served_before_it_arrives() -> None:
    _, records = run(made_of([[1] * 4, [2] * 4, [3] * 4], [20, 2, 2], gap=0.05))
    first = {}
    for record in records:
        for span in record.spans:
            first.setdefault(span.request_id, record.start_time)
    assert list(first) == ["<0>", "<1>", "<2>"]
    assert first["<0>"] == 0.0
    assert 0.05 <= first["<1>"] < 0.05 + 0.015
    assert 0.10 <= first["<2>"] < 0.10 + 0.016


def test_the_clock_advances_while_there_is_no_request() -> None:
    report, records = run(made_of([[1] * 4, [2] * 4], [2, 2], gap=100.0))
    assert [record.start_time for record in records] == pytest.approx([0.0, 0.014, 100.0, 100.014])
    assert report.seconds == pytest.approx(100.025)
    assert report.latency.p99 == pytest.approx(0.025)


def test_waiting_before_the_first_step_counts_as_waiting() -> None:
    report, _ = run([SimulatedRequest("a", -1.0, [1] * 4, (1,))])
    assert report.time_to_first_token.p50 == pytest.approx(1.014)
    assert report.seconds == pytest.approx(1.014)


def test_requests_in_the_wrong_order_are_refused() -> None:
    requests = [SimulatedRequest("a", 1.0, [1], (1,)), SimulatedRequest("b", 0.5, [1], (1,))]
    with pytest.raises(ValueError, match="'a' and 'b' are out of order"):
        run(requests)


def test_a_request_that_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'<0>' grows to 258 tokens; .* sequence of 257 \(64 blocks of 4 tokens\)"):
        run(made_of([[1] * 200], [58]))
    report, _ = run(made_of([[1] * 200], [57]))
    assert report.num_output_tokens == 57


def test_a_run_without_requests_takes_no_time() -> None:
    report, records = run([])
    assert (report.seconds, report.num_sequences, records) == (0.0, 0, [])
    assert json.loads(json.dumps(report.as_dict()))["hit_rate"] == 0.0
    report.table()


def test_shared_prefixes_are_found() -> None:
    load = SyntheticLoad(num_requests=40, prompt_tokens=Lengths("fixed", 4), shared_prefix_tokens=32, rate=5.0)
    report, _ = run(load, max_num_seqs=4, block_size=16)
    assert report.hit_rate == pytest.approx(39 * 32 / (40 * 36))
    without, _ = run(load, max_num_seqs=4, block_size=16, enable_prefix_caching=False)
    assert without.hit_rate == 0.0
    assert without.seconds > report.seconds


def test_a_simulated_run_can_be_recorded_and_simulated_again(tmp_path: Path) -> None:
    load = SyntheticLoad(num_requests=30, rate=3.0, prompt_tokens=Lengths("exponential", 40), shared_prefix_tokens=16)
    config = EngineConfig(max_num_seqs=4, num_blocks=80)
    with Recorder(tmp_path / "run", config) as recorder:
        report = simulate(load, config, COST, observer=recorder.observe)
    recording = read_recording(tmp_path / "run")
    assert flat(report_of(recording)) == pytest.approx(flat(report), rel=1e-5)
    again = simulate(replay(recording), config, fit_cost([recording]))
    assert again.num_steps == report.num_steps
    assert again.seconds == pytest.approx(report.seconds, rel=1e-6)
    assert again.hit_rate == report.hit_rate > 0


# ------------------------------------------------------------------------------------------------ draft tokens

CHEAP_ROWS, DEAR_ROWS = StepCost.linear(fixed=0.1, per_token=0.001), StepCost.linear(fixed=0.001, per_token=0.1)
SPECULATED = SyntheticLoad(num_requests=20, prompt_tokens=Lengths("fixed", 8), output_tokens=Lengths("fixed", 200))


def speculated(
    acceptance: float, cost: StepCost = CHEAP_ROWS, share: float = 1.0
) -> tuple[RunReport, list[StepRecord]]:
    records: list[StepRecord] = []
    config, rate = EngineConfig(max_num_seqs=2, num_blocks=64), AcceptanceRate(acceptance, share)
    return simulate(SPECULATED, config, cost, observer=records.append, acceptance_rate=rate), records


def test_draft_tokens_save_steps_where_rows_are_cheap() -> None:
    without, _ = speculated(0.0)
    assert without.num_steps == 20 // 2 * 200
    often, _ = speculated(1.0)
    assert often.num_steps < without.num_steps / 8
    half, _ = speculated(1.0, share=0.5)
    assert often.seconds < half.seconds < without.seconds
    assert often.num_output_tokens == without.num_output_tokens == 20 * 200


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    without, _ = speculated(0.0, DEAR_ROWS)
    report, _ = speculated(0.7, DEAR_ROWS)
    assert report.seconds < without.seconds * 1.02


def test_how_good_draft_tokens_were_is_found_in_the_steps() -> None:
    _, records = speculated(0.6)
    rate = AcceptanceRate.from_steps(records)
    assert rate is not None
    assert rate.acceptance == pytest.approx(0.6, abs=0.05)
    assert AcceptanceRate.from_steps(speculated(0.0)[1]) is None


def test_a_sequence_that_ends_in_the_middle_of_its_draft_tokens_keeps_its_length() -> None:
    requests = [SimulatedRequest("a", 0.0, [1, 2, 3], (5, 2, 9)), SimulatedRequest("b", 0.0, [1], (1,))]
    report = simulate(requests, EngineConfig(**LOOSE), CHEAP_ROWS, acceptance_rate=AcceptanceRate(1.0))
    assert report.num_output_tokens == 17
    assert report.num_steps < 9


# ------------------------------------------------------------------------------------------------------- the numbers


def test_percentiles_match_numpy() -> None:
    log, rng = RunLog(1, 1), np.random.default_rng(0)
    firsts, lasts = rng.random(1000), 1 + rng.random(1000)
    for first, last in zip(firsts, lasts, strict=True):
        log.observe_sequence(-1.0, first, last, 5)
    report = log.report(2.0, num_preemptions=0, num_prompt_tokens=10, num_cached_tokens=1)

    def percentiles(values: Any) -> Percentiles:
        return Percentiles(*np.percentile(values, (50, 95, 99)))

    for found, values in (
        (report.time_to_first_token, firsts + 1),
        (report.latency, lasts + 1),
        (report.time_per_output_token, (lasts - firsts) / 4),
    ):
        expected = percentiles(values)
        assert (found.p50, found.p95, found.p99) == pytest.approx((expected.p50, expected.p95, expected.p99), rel=1e-6)


def test_the_mean_number_of_blocks_is_weighted_by_time() -> None:
    log = RunLog(1, 100)
    log.observe_step(1, 10, 3.0)
    log.observe_step(1, 50, 1.0)
    report = log.report(4.0, num_preemptions=0, num_prompt_tokens=0, num_cached_tokens=0)
    assert (report.mean_blocks_used, report.peak_blocks_used) == (20.0, 50)


def test_poisson_arrivals_and_lengths_match_the_request_and_are_reproducible() -> None:
    load = SyntheticLoad(num_requests=20_000, rate=50.0, prompt_tokens=Lengths("uniform", 5, 15), max_model_len=2000)
    requests = list(load)
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(400, rel=0.05)
    assert np.diff(arrivals).std() == pytest.approx(0.02, rel=0.05)
    assert {len(request.prompt_token_ids) for request in requests} == set(range(5, 16))
    assert np.mean([request.num_output_tokens[0] for request in requests]) == pytest.approx(100, rel=0.03)
    assert len({request.request_id for request in requests}) == 20_000
    assert requests == list(load)


@pytest.mark.parametrize("shape", ["fixed:100", "100", "uniform:50:150", "exponential:100", "lognormal:100:1"])
def test_lengths_have_their_nominal_mean(shape: str) -> None:
    drawn = Lengths.parse(shape).draw(np.random.default_rng(0), 50_000)
    assert np.mean(drawn) == pytest.approx(100, rel=0.03)
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "fixed:1:2", "uniform:5", "uniform:9:3", "lognormal:5", "exponential:0.5", "nan", "zipf:2"],
)
def test_invalid_length_distributions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the lengths are"):
        Lengths.parse(text)


def test_a_prompt_and_its_answer_fit_the_context_length() -> None:
    load = SyntheticLoad(
        num_requests=500, prompt_tokens=Lengths("exponential", 60), shared_prefix_tokens=8, max_model_len=64
    )
    for request in load:
        assert len(request.prompt_token_ids) + request.num_output_tokens[0] <= 64
        assert request.num_output_tokens[0] >= 1
    with pytest.raises(ValueError, match="no prompt fits"):
        list(SyntheticLoad(num_requests=1, shared_prefix_tokens=63, max_model_len=64))


def test_only_the_given_share_of_prompts_has_a_prefix_and_prefixes_differ() -> None:
    load = SyntheticLoad(num_requests=4000, shared_prefix_tokens=6, shared_prefix_share=0.25, num_prefixes=3)
    starts = [tuple(request.prompt_token_ids[:6]) for request in load if len(request.prompt_token_ids) == 106]
    assert len(starts) == pytest.approx(1000, rel=0.1)
    assert len(set(starts)) == 3


# -------------------------------------------------------------------------------------------------------- step costs


def synthetic_recording(cost: StepCost, noise: float = 0.0, outliers: int = 0) -> Recording:
    """Steps of all kinds whose durations follow the cost, with noise; one in `outliers` took 20 times as long."""
    load = SyntheticLoad(
        num_requests=300, rate=2.0, prompt_tokens=Lengths("lognormal", 60, 1), output_tokens=Lengths("exponential", 20)
    )
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=128)
    steps: list[StepRecord] = []
    rng, clock = np.random.default_rng(0), 0.0

    def observe(record: StepRecord) -> None:
        nonlocal clock
        seconds = cost.seconds(load_of(record)) * float(np.exp(rng.normal(0.0, noise)))
        if outliers and record.step % outliers == 0:
            seconds *= 20
        steps.append(replace(record, start_time=clock, duration=seconds))
        clock += seconds

    simulate(load, config, COST, observer=observe)
    return Recording(config, None, {}, steps)


def test_the_fit_finds_known_costs() -> None:
    cost = StepCost.linear(0.02, 0.0015, per_logit_row=0.0007, per_context_token=3e-6, per_attended_key=2e-7)
    fitted = fit_cost([synthetic_recording(cost)])
    assert fitted.per_logit_row == pytest.approx(0.0007, rel=1e-6)
    assert fitted.per_context_token == pytest.approx(3e-6, rel=1e-6)
    assert fitted.per_attended_key == pytest.approx(2e-7, rel=1e-6)
    for tokens, seconds in fitted.knots:
        assert seconds == pytest.approx(0.02 + 0.0015 * tokens, rel=1e-6)


def test_the_fit_follows_a_change_of_slope() -> None:
    cost = StepCost(((1, 0.03), (2, 0.05), (16, 0.06), (128, 0.3)), per_context_token=1e-5)
    fitted = fit_cost([synthetic_recording(cost)])
    for tokens in (1, 2, 5, 12, 16, 40, 100, 128):
        load = StepLoad(tokens, 1, 500, 500)
        assert fitted.seconds(load) == pytest.approx(cost.seconds(load), rel=1e-4)


def test_the_fit_is_robust_to_noise_and_outliers() -> None:
    cost = StepCost.linear(0.02, 0.0015, per_context_token=3e-6)
    recording = synthetic_recording(cost, noise=0.05, outliers=15)
    fitted = fit_cost([recording])
    expected = sum(cost.seconds(load_of(step)) for step in recording.steps)
    assert sum(fitted.seconds(load_of(step)) for step in recording.steps) == pytest.approx(expected, rel=0.02)


def test_no_cost_is_negative() -> None:
    cost = StepCost.linear(0.02, 0.001)
    fitted = fit_cost([synthetic_recording(cost, noise=0.3)])
    levels = [seconds for _, seconds in fitted.knots]
    assert levels == sorted(levels)
    assert levels[0] >= 0
    assert min(fitted.per_logit_row, fitted.per_context_token, fitted.per_attended_key) >= 0


def test_a_fit_needs_enough_steps() -> None:
    with pytest.raises(ValueError, match="two different numbers of tokens"):
        fit_cost([Recording(EngineConfig(), None, {}, [])])


def test_knots_lie_where_there_are_steps() -> None:
    assert choose_knots([1, 1, 2, 3, 4, 300]) == [1, 2, 4, 300]
    assert choose_knots([7, 9]) == [7, 8, 9] or choose_knots([7, 9]) == [7, 9]
    assert choose_knots([1, 2048]) == [1, 2048]


def test_a_step_lasts_until_the_next_one_if_there_is_work() -> None:
    def step(start: float, num_running: int) -> StepRecord:
        return StepRecord(0, start, 1.0, (), num_running, 0, 0, 0, 0, 0, 0, 0)

    steps = [step(0.0, 1), step(1.5, 0), step(9.0, 3)]
    assert [seconds for _, seconds in timed_steps(steps)] == [1.5, 1.0, 1.0]


def test_the_features_of_a_step() -> None:
    spans = [
        Span(0, 0, 9, [1], 1, 10),  # a decode
        Span(1, 1, 0, [1, 2, 3], 0, 7),  # a chunk
        Span(2, 2, 4, [1, 2], 1, 6),  # a prompt's last part
        Span(3, 3, 2, [1], 0, 9),  # a chunk of one token
        Span(4, 4, 0, [1], 1, 1),  # a prompt of one token
    ]
    plan = StepPlan(tuple(spans), ())
    expected = StepLoad(8, 3, 10 + 3 + 6 + 3 + 1, 10 + (1 + 2 + 3) + (5 + 6) + 3 + 1)
    assert load_of_plan(plan) == expected
    assert StepLoad.from_spans((span.start, span.length, span.num_logit_rows) for span in spans) == expected


def test_costs_are_interpolated_between_knots_and_extrapolated_beyond_them() -> None:
    cost = StepCost(((2, 1.0), (4, 3.0), (8, 4.0)), per_logit_row=10.0)
    for tokens, seconds in ((1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (6, 3.5), (8, 4.0), (12, 5.0)):
        assert cost.seconds(StepLoad(tokens, 0, 0, 0)) == pytest.approx(seconds)
    assert cost.seconds(StepLoad(2, 3, 0, 0)) == pytest.approx(31.0)


def test_a_cost_survives_a_round_trip_through_json() -> None:
    cost = StepCost(((1, 0.5), (4, 0.75)), 0.1, 0.2, 0.3)
    assert StepCost.parse(json.dumps(cost.as_dict())) == cost
    linear = StepCost.parse('{"fixed": 0.5, "per_token": 0.25, "per_logit_row": 1}')
    assert linear == StepCost.linear(0.5, 0.25, per_logit_row=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[1, 2]", "must be an object"),
        ('{"fixed": 1}', "lacks 'per_token'"),
        ('{"fixed": 1, "per_tokens": 2}', "did you mean 'per_token'"),
        ('{"fixed": 1, "per_token": -1}', "per_token is -1"),
        ('{"knots": 5}', "knots is 5"),
        ('{"knots": [[1, 2]]}', "two or more pairs"),
        ('{"knots": [[2, 1], [1, 2]]}', "both rising"),
        ('{"knots": [[1, 2], [2, 1]]}', "both rising"),
    ],
)
def test_invalid_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCost.parse(text)
