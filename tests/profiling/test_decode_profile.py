"""A profile of a decode step of the small embedded model. No test here depends on durations."""

import json
from pathlib import Path

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine
from inflight.profiling import StepProfile, profile_decode

PARTS = [
    *("linears", "attention", "small operators", "Python in the forward pass"),
    *("packing the batch", "sampler", "scheduler", "engine, other"),
]


def engine_with(**options: object) -> Engine:
    return Engine(str(DEMO_MODEL), EngineConfig(**{"dtype": "float32", "max_num_seqs": 2, "num_blocks": 40, **options}))  # type: ignore


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_with()


@pytest.fixture(scope="module", params=["auto", "torch"])
def profile(request: pytest.FixtureRequest) -> StepProfile:
    return profile_decode(engine_with(attention_backend=request.param), 2, 40, 2)


@pytest.mark.thorough("torch")
def test_the_parts_are_complete_and_add_up_to_the_step(profile: StepProfile) -> None:
    assert [part.name for part in profile.parts] == PARTS
    assert all(part.seconds > 0 for part in profile.parts)
    assert sum(part.seconds for part in profile.parts) == pytest.approx(profile.step_seconds)
    assert sum(map(profile.share, profile.parts)) == pytest.approx(1)


def test_floors_exist_and_are_positive(profile: StepProfile) -> None:
    floors = {part.name: part.floor_seconds for part in profile.parts if part.floor_seconds is not None}
    assert set(floors) == {"linears", "attention"}
    assert all(floor > 0 for floor in floors.values())
    assert profile.floor_seconds > 0


def test_the_measured_step_is_the_requested_one(profile: StepProfile) -> None:
    assert (profile.num_sequences, profile.num_steps) == (2, 2)
    assert profile.num_cached_tokens == pytest.approx(40, abs=2)
    num_layers, num_kv_heads, head_size = 4, 4, 32
    assert profile.work.cache_bytes == 2 * (profile.num_cached_tokens + 1) * num_layers * num_kv_heads * head_size * 8


def test_a_profile_survives_a_round_trip_through_json(profile: StepProfile, tmp_path: Path) -> None:
    profile.write_json(tmp_path / "profile.json")
    read = json.loads((tmp_path / "profile.json").read_text())
    assert read == json.loads(json.dumps(profile.as_dict()))
    assert [part["name"] for part in read["parts"]] == PARTS


def test_the_engine_is_unchanged_afterwards(engine: Engine) -> None:
    before = {name: set(vars(owner)) for name, owner in (("runner", engine.runner), ("scheduler", engine.scheduler))}
    backend = engine.runner.executor.backend  # type: ignore[attr-defined]
    profile_decode(engine, 1, 4, 1)
    after = {name: set(vars(owner)) for name, owner in (("runner", engine.runner), ("scheduler", engine.scheduler))}
    assert before == after
    assert engine.runner.executor.backend is backend  # type: ignore[attr-defined]
    assert not engine.has_unfinished_requests
    assert engine.stats().num_blocks_used == 0
    engine.submit(engine.inputs.accept("next", [1, 2, 3], SamplingParams(max_tokens=1)))
    assert engine.step()[0].error is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 40, 1), "the engine has 2 slots"),
        ((2, 400, 1), "blocks of the cache; it has 40"),
        ((1, 1024, 1), "this model takes 1024"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(engine: Engine, arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_decode(engine, *arguments)
