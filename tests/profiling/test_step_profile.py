"""How measured times become parts of a step, and the least work of a step. These tests read no clock."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from inflight.contracts.api.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.execution.attention import AttentionSpec, CpuAttention, ReferenceAttention
from inflight.execution.kernels import kernels_available
from inflight.execution.weights.formats import PLAIN
from inflight.profiling import Machine
from inflight.profiling.operators import OperatorTimes, PhaseTimes, timed_calls
from inflight.profiling.step_profile import StepProfile, split_forward, take_apart
from inflight.profiling.table import profile_table
from inflight.profiling.work import StepWork, decode_work, has_prepacked_linears
from tests import zoo

MACHINE = Machine(read_bytes_per_second=1000.0, operations_per_second=1e6)
WORK = StepWork(weight_bytes=500, expert_bytes=0, linear_operations=100, cache_bytes=100)
PHASES = [PhaseTimes(scheduler=0.1, packing=0.1, forward=2.0, sampler=0.2, engine=0.1)] * 3
OPERATORS = [OperatorTimes(linears=1.0, experts=0.0, attention=0.4, small_operators=0.5, python=0.7)] * 3
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, value_head_size=32, scale=1.0)


def test_parts_add_up_to_the_step() -> None:
    parts, correction = take_apart(5.0, PHASES, OPERATORS, MACHINE, WORK)
    assert sum(part.seconds for part in parts) == pytest.approx(5.0)
    assert correction == pytest.approx(2.0)
    seconds = {part.name: part.seconds / correction for part in parts}
    assert seconds["linears"] == pytest.approx(1.0)
    assert seconds["attention"] == pytest.approx(0.4)
    assert seconds["small operators"] == pytest.approx(0.25)
    assert seconds["Python in the forward pass"] == pytest.approx(0.35)


def test_floors_are_the_greater_of_reading_and_arithmetic() -> None:
    parts, _ = take_apart(5.0, PHASES, OPERATORS, MACHINE, WORK)
    assert [part.floor_seconds for part in parts[:3]] == [0.5, 0.1, None]
    parts, _ = take_apart(5.0, PHASES, OPERATORS, MACHINE, replace(WORK, linear_operations=2_000_000))
    assert parts[0].floor_seconds == 2.0
    assert parts[0].times_floor == pytest.approx(parts[0].seconds / 2.0)


def printed(profile: StepProfile) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(profile_table(profile))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_time_below_its_floor_is_no_figure() -> None:
    info = Engine(zoo.build("llama"), EngineConfig(num_blocks=8)).model_info
    parts, correction = take_apart(5.0, PHASES, OPERATORS, MACHINE, WORK)
    profile = StepProfile(info, 1, 2, 3.0, 4, 5.0, parts, correction, MACHINE, WORK)
    assert profile.below_floor == []
    assert "less than the floor" not in printed(profile)
    assert profile.times_floor == pytest.approx(5.0 / 0.6)
    slow = replace(profile, machine=replace(MACHINE, read_bytes_per_second=100.0))
    assert slow.below_floor == ["the step"]
    assert slow.as_dict()["times_floor"] is None
    text = printed(slow)
    assert "the step took less than the floor, which therefore is none" in text
    assert "0.83" not in text
    linears = replace(parts[0], floor_seconds=10.0)
    assert replace(profile, parts=(linears, *parts[1:])).below_floor == ["linears"]
    assert linears.times_floor is None
    assert replace(linears, floor_seconds=linears.seconds * 1.001).times_floor == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("forward", [0.5, 1.4, 1.5, 2.6, 10.0])
def test_a_forward_pass_is_divided_for_any_profiler_measurements(forward: float) -> None:
    operators = {"linears": 1.0, "experts": 0.2, "attention": 0.4, "small_operators": 0.5, "python": 0.7}
    split = split_forward(forward, operators)
    assert sum(split.values()) == pytest.approx(forward)
    assert all(value > 0 for value in split.values())


def test_calls_are_timed_on_one_object_and_only_inside_the_block() -> None:
    class Owner:
        def double(self, number: int) -> int:
            return 2 * number

    owner, other = Owner(), Owner()
    with timed_calls(owner, "double") as seconds:
        assert owner.double(2) + other.double(1) == 6
    owner.double(3)
    assert len(seconds) == 1
    assert vars(owner) == {}


def test_weights_are_counted_once_and_embeddings_only_as_output_heads() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "linear": nn.Linear(4, 6), "head": nn.Linear(4, 10), "again": nn.Linear(4, 10)}
    )
    model["again"].weight = model["head"].weight = model["embed"].weight
    work = decode_work(model, [], ReferenceAttention(torch.device("cpu"), torch.float32, 4), 4, [5, 7])
    assert work.weight_bytes == 4 * (4 * 6 + 4 * 10)
    assert work.linear_operations == 2 * 2 * (4 * 6 + 4 * 10)
    assert work.cache_bytes == 0
    assert not has_prepacked_linears(model)


def test_experts_are_read_but_not_every_row_goes_through_them() -> None:
    module = nn.Linear(4, 6)
    module.experts = nn.Parameter(torch.ones(3, 4, 5))
    work = decode_work(module, [], ReferenceAttention(torch.device("cpu"), torch.float32, 4), 4, [5])
    assert (work.weight_bytes, work.expert_bytes) == (4 * 4 * 6, 4 * 3 * 4 * 5)
    assert work.linear_operations == 2 * 4 * 6


def test_of_experts_those_count_that_tokens_are_expected_to_choose() -> None:
    """Two of four: one token reads half of them, two tokens three quarters."""
    runner = Engine(zoo.build("qwen3_moe"), EngineConfig(num_blocks=8)).runner
    executor = runner.require_packed()
    mixtures = [each.inflight_experts for each in runner.model.modules() if hasattr(each, "inflight_experts")]
    stored = sum(each.prepacked.nbytes for experts in mixtures for each in (*experts.up, *experts.down))
    assert [(each.num_chosen, len(each.up)) for each in mixtures] == [(2, 4)] * len(mixtures)
    for num_tokens, share in ((1, 1 / 2), (2, 3 / 4)):
        work = decode_work(runner.model, executor.specs, executor.backend, 16, [5] * num_tokens)
        assert work.expert_bytes == pytest.approx(stored * share)
        assert work.num_bytes == work.weight_bytes + work.expert_bytes + work.cache_bytes


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_prepacked_weights_count_with_their_size_in_memory() -> None:
    model = nn.Sequential(PLAIN.prepack_linear(torch.ones(64, 32), None))
    work = decode_work(model, [], ReferenceAttention(torch.device("cpu"), torch.float32, 4), 4, [1])
    assert work.weight_bytes == 4 * 64 * 32
    assert has_prepacked_linears(model)


@pytest.mark.parametrize(
    ("spec", "num_visible"),
    [(SPEC, 9 + 20), (replace(SPEC, window=12), 9 + 12), (replace(SPEC, chunk=8), 1 + 4)],
)
def test_a_step_reads_the_part_of_the_cache_that_its_queries_see(spec: AttentionSpec, num_visible: int) -> None:
    backend = ReferenceAttention(torch.device("cpu"), torch.bfloat16, 16)
    work = decode_work(nn.Identity(), [spec, spec], backend, 16, [9, 20])
    assert work.cache_bytes == 2 * num_visible * 2 * (16 + 32) * 2


@pytest.mark.skipif(not kernels_available(), reason="needs our kernels")
def test_scales_of_an_int8_cache_are_read_too() -> None:
    work = decode_work(nn.Identity(), [SPEC], CpuAttention(torch.int8, 16), 16, [10])
    assert work.cache_bytes == 10 * 2 * (16 + 32 + 4 + 4)
