"""Commands that take more than ten seconds print an estimate first."""

import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from inflight.cli import structure
from inflight.contracts.step.record import StepRecord
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine, EngineConfig
from inflight.lessons import methods
from inflight.lessons.methods import Pace
from inflight.lessons.run import LessonRequest
from inflight.observe.step_capture import StepCapture
from inflight.profiling import decode_profile
from tests.command import Command


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (9.9, ""),
        (10.4, "inflight: reading: about 10 s\n"),
        (40.0, "inflight: reading: about 40 s\n"),
        (170.0, "inflight: reading: about 3 min\n"),
        (float("nan"), ""),
    ],
)
def test_only_what_is_long_is_said(seconds: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    structure.say_if_long(seconds, "reading: ")
    assert capsys.readouterr() == ("", said)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock for the lessons and the profile, which the test advances."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    for module in (methods, decode_profile):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_lesson_is_estimated_from_a_step_and_a_prompt(clock: SimpleNamespace) -> None:
    """A token takes a second, and a pass three more."""

    class Model:
        device = torch.device("cpu")

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> None:
            clock.now += 3 + input_ids.numel()

    pace = Pace.measure(Model(), 2, 30)  # type: ignore[arg-type]
    assert (pace.step, pace.prompt_token) == pytest.approx((methods.SPARE * 5, methods.SPARE * 1.1))
    requests = [LessonRequest([1] * 10, number) for number in (4, 20, 4, 4)]
    in_waves, always_full = 20 + 4, 20
    assert pace.seconds(requests, 2) == pytest.approx(methods.SPARE * ((in_waves + always_full) / 2 * 5 + 40 * 1.1))


def test_a_race_says_what_all_of_its_methods_take(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "measure", lambda model, num_slots, num_prompt_tokens: Pace(5.0, 0.0))
    prompts = ("race", "Once", "Long ago", "--max-tokens", 2)
    assert command(*prompts).stderr == "inflight: about 40 s\n"
    assert command(*prompts, "--method", "engine").stderr == ""


def test_a_profile_tells_how_long_its_steps_take(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    step = decode_profile.Decodes.step

    def slow_step(decodes: decode_profile.Decodes) -> None:
        step(decodes)
        clock.now += 1.0

    monkeypatch.setattr(decode_profile.Decodes, "step", slow_step)
    told: list[tuple[float, float]] = []
    engine = Engine(str(DEMO_MODEL), EngineConfig(num_blocks=40))
    decode_profile.profile_decode(engine, 1, 40, 2, announce=lambda seconds: told.append((clock.now, seconds)))
    ((when, seconds),) = told
    assert (when, when + seconds) == (2.0 + decode_profile.SETTLING_STEPS, clock.now)


def test_show_tells_how_long_its_steps_take(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    durations: list[float] = []
    observe = StepCapture.observe

    def watch(capture: StepCapture, record: StepRecord) -> None:
        observe(capture, record)
        durations.append(record.duration)

    monkeypatch.setattr(StepCapture, "observe", watch)
    monkeypatch.setattr(import_module("inflight.cli.show"), "say_if_long", told.append)
    for options, num_steps in (((), 5), (("--step", "1-2"), 3)):
        assert command("show", *options).returncode == 0
        assert len(durations) == num_steps
        assert told == [durations[0] * num_steps]
        told.clear()
        durations.clear()


def test_commands_pass_on_what_they_are_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "LONG", 0.0)
    done = command("profile", "--num-seqs", 1, "--context", 20, "--steps", 1)
    assert re.fullmatch(r"inflight: about \d+ s\n", done.stderr)
