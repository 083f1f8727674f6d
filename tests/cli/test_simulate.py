"""`inflight simulate`, as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inflight.cli import app
from inflight.observe.recorder import read_recording
from tests.observe.recordings import NUM_TOKENS, run_recorded

LINEAR = '{"fixed": 0.01, "per_token": 0.001}'


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def report(*arguments: object) -> dict[str, Any]:
    done = simulate(*arguments, "--json")
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "run"
    run_recorded(path)
    return path


def test_synthetic_requests_are_simulated() -> None:
    done = simulate("--synthetic", "--num-requests", 20, "--step-cost", LINEAR, "--max-num-seqs", 4)
    assert done.exit_code == 0
    assert "throughput" in done.stdout
    values = report("--synthetic", "--num-requests", 20, "--output-tokens", 10, "--step-cost", LINEAR, "--rate", 0.01)
    assert values["num_output_tokens"] == 200
    assert values["time_to_first_token"]["p50"] == pytest.approx(0.11)


def test_a_trace_is_simulated_as_it_was_recorded(recording: Path) -> None:
    values = report("--trace", recording)
    steps = read_recording(recording).steps
    assert values["num_steps"] == len(steps)
    assert values["num_output_tokens"] == sum(NUM_TOKENS)
    assert values["num_preemptions"] == steps[-1].num_preemptions > 0
    assert values["step_cost"]["knots"]


def test_a_trace_can_be_simulated_with_another_engine_and_machine(recording: Path) -> None:
    values = report("--trace", recording, "--num-blocks", 100, "--max-num-seqs", 8, "--step-cost", LINEAR)
    assert values["num_preemptions"] == 0
    assert values["num_blocks"] == 100
    assert values["step_cost"]["knots"] == [[0, 0.01], [1, 0.011]]


def test_draft_tokens_are_right_as_often_as_is_said_and_only_if_anything_speculates(tmp_path: Path) -> None:
    cheap_rows = ("--step-cost", '{"fixed": 0.1, "per_token": 0.001}', "--output-tokens", 100, "--max-num-seqs", 4)
    asked = ("--synthetic", "--num-requests", 8, *cheap_rows)
    without, speculated = report(*asked), report(*asked, "--acceptance", 0.8, "--record", tmp_path / "run")
    assert without["num_draft_tokens"] == 0
    assert speculated["num_steps"] < without["num_steps"] / 2
    assert speculated["num_draft_tokens"] > speculated["num_accepted_tokens"] > 400
    assert "accepted (" in simulate(*asked, "--acceptance", 0.8).stdout
    again = ("--trace", tmp_path / "run", *cheap_rows[:2])
    assert report(*again)["num_accepted_tokens"] > 400
    for off in (("--acceptance", 0), ("--speculation", "off")):
        assert report(*again, *off)["num_steps"] == without["num_steps"]
    assert "drafts nothing" in simulate(*again, "--speculation", "off", "--acceptance", 0.5).stderr
    assert "no draft model is loaded here" in simulate(*again, "--draft-model", "x").stderr


def test_synthetic_requests_use_the_costs_of_a_recorded_machine(recording: Path, tmp_path: Path) -> None:
    arguments = ("--synthetic", "--num-requests", 5, "--prompt-tokens", 8, "--output-tokens", 8, "--fit", recording)
    values = report(*arguments, "--fit", recording, "--record", tmp_path / "simulated")
    assert values["num_blocks"] == 13
    simulated = read_recording(tmp_path / "simulated")
    assert simulated.config.scheduling.max_num_seqs == 3
    assert len(simulated.steps) == values["num_steps"]


def test_steps_beyond_the_recording_are_said_to_be_extrapolated(recording: Path) -> None:
    assert report("--trace", recording)["num_extrapolated_steps"] == 0
    assert "extrapolated" not in simulate("--trace", recording).stdout
    large = ("--synthetic", "--num-requests", 9, "--prompt-tokens", 90, "--output-tokens", 4, "--fit", recording)
    more = (*large, "--max-num-seqs", 9, "--max-num-batched-tokens", 500, "--num-blocks", 900)
    values = report(*more)
    assert 0 < values["num_extrapolated_steps"] <= values["num_steps"]
    text = " ".join(simulate(*more).stdout.split())
    assert f"extrapolated: {values['num_extrapolated_steps']} of {values['num_steps']} steps are beyond" in text
    assert "up to 500 tokens (10 recorded)" in text
    assert "num_extrapolated_steps" not in report("--synthetic", "--num-requests", 2, "--step-cost", LINEAR)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --trace FILE or --synthetic"),
        (("--synthetic", "--trace", "x"), "either --trace FILE or --synthetic"),
        (("--synthetic",), "the step costs are unknown"),
    ],
)
def test_a_missing_argument_is_reported_in_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = simulate(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
