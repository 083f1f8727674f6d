"""Sequence mixers: the kernels compute the definition, with the same bits in any company, chunking and number of
threads."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.kernels import kernels_available
from inflight.execution.mixing import CpuMixing, MixingBackend, Recurrence, ReferenceMixing
from inflight.execution.mixing.elementwise import BatchInvariantElementwise
from inflight.execution.mixing.interface import MixerSpec
from inflight.execution.preparation.agreement import relative_error
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.threads import torch_threads

pytestmark = pytest.mark.skipif(not kernels_available(), reason="needs the CPU kernels")

CPU = torch.device("cpu")
NUM_SLOTS = 4
KINDS: dict[str, dict[str, Any]] = {
    "gated delta rule": {"is_delta": True, "decay": "head"},
    "kimi delta attention": {"is_delta": True, "decay": "key"},
    "gated linear attention": {"decay": "key", "beta": False},
    "mamba 2": {"decay": "head", "skip": True},
    "selective scan": {"decay": "element", "beta": False},
}


def batch_of(*spans: tuple[int, int, int]) -> RaggedBatch:
    """A step of spans, given as (slot, start, end)."""
    made = tuple(Span(slot, slot, start, [0] * (end - start), 1, end) for slot, start, end in spans)
    return RaggedBatch.from_plan(StepPlan(made, ()), 16, CPU)


def drawn(kind: str, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Recurrence:
    """The input of a recurrence of one sequence: 6 heads of values of 40, over 3 or 1 of keys of 21."""
    options, generator = dict(KINDS[kind]), torch.Generator().manual_seed(seed)
    heads, key_heads, rows, columns = 6, 1 if kind == "selective scan" else 3, 21, 40

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    decay = -functional.softplus(
        normal(*{"head": (length, heads), "key": (length, heads, rows)}.get(options["decay"], (length, heads, columns)))
    )
    rates = None
    if options["decay"] == "element":
        decay, rates = -decay, -functional.softplus(torch.arange(heads * rows * columns) % 7 - 3.0)
        rates = rates.view(heads, rows, columns)
    return Recurrence(
        normal(length, key_heads, rows).to(dtype),
        normal(length, key_heads, rows).to(dtype),
        normal(length, heads, columns).to(dtype),
        decay,
        beta=normal(length, heads).sigmoid() if options.get("beta", True) else None,
        skip=torch.arange(heads) / 3.0 if options.get("skip") else None,
        rates=rates,
        is_delta=options.get("is_delta", False),
        normalizes=options.get("is_delta", False),
        scale=0.5,
        dtype=dtype,
    )


ROWS = ("query", "key", "value", "decay", "beta")


def laid_out(parts: Sequence[tuple[Recurrence, int, int]], padding: int = 0) -> Recurrence:
    """Tokens of sequences end to end, given as (input, start, end), and rows of no span."""
    first, fields = parts[0][0], {}
    for name in ROWS:
        if getattr(first, name) is not None:
            rows = torch.cat([getattr(each, name)[start:end] for each, start, end in parts])
            fields[name] = torch.cat([rows, rows.new_ones(padding, *rows.shape[1:])])
    return replace(first, **fields)


def allocated(mixing: MixingBackend, num_states: int = NUM_SLOTS) -> MixingBackend:
    mixing.allocate(num_states)
    return mixing


def run(mixing: MixingBackend, steps: Sequence[Sequence[tuple[int, int, int]]], inputs: Sequence[Any]) -> list[Any]:
    """The output of each slot's sequence, from its spans."""
    found: list[list[torch.Tensor]] = [[] for _ in inputs]
    for step in steps:
        mixing.begin_step(batch_of(*step))
        mixing.begin_pass()
        if isinstance(inputs[0], Recurrence):
            output = mixing.recur(laid_out([(inputs[slot], start, end) for slot, start, end in step], padding=3))
        else:
            others = inputs[0][1:]
            rows = torch.cat([inputs[slot][0][start:end] for slot, start, end in step])
            output = mixing.convolve(torch.cat([rows, rows.new_ones(3, rows.shape[1])]), *others)
        assert not output[-3:].any(), "rows of no span are zero"
        for (slot, start, end), rows in zip(
            step, output[:-3].split([end - start for _, start, end in step]), strict=True
        ):
            assert len(rows) == end - start
            found[slot].append(rows)
    return [torch.cat(each) for each in found]


def steps_of(rng: random.Random, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Sequences in random pieces, in random company."""
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        running = [slot for slot, length in enumerate(lengths) if done[slot] < length and rng.random() < 0.7]
        if running:
            rng.shuffle(running)
            ends = {slot: min(lengths[slot], done[slot] + rng.choice((1, 1, 2, 5, 40))) for slot in running}
            steps.append([(slot, done[slot], ends[slot]) for slot in running])
            for slot in running:
                done[slot] = ends[slot]
    return steps


LENGTHS = (50, 37, 70, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrences_are_the_definition(kind: str, dtype: torch.dtype) -> None:
    inputs = [drawn(kind, length, seed, dtype) for seed, length in enumerate(LENGTHS)]
    specs, steps = [inputs[0].spec], steps_of(random.Random(1), LENGTHS)
    own = run(allocated(CpuMixing(specs)), steps, inputs)
    definition = run(allocated(ReferenceMixing(specs, CPU)), steps, inputs)
    for output, expected in zip(own, definition, strict=True):
        assert output.dtype == dtype
        assert relative_error(output, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "swish"])
@pytest.mark.parametrize("num_taps", [2, 4])
def test_convolutions_are_the_definition(num_taps: int, activation: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(sizes, generator=generator).to(dtype) for sizes in ((53, num_taps), (53,)))
    inputs = [(torch.randn(length, 53, generator=generator).to(dtype), weight, bias, activation) for length in LENGTHS]
    specs, steps = [MixerSpec(False, (num_taps - 1, 53))], steps_of(random.Random(2), LENGTHS)
    own = run(allocated(CpuMixing(specs)), steps, inputs)
    for output, (x, *_) in zip(own, inputs, strict=True):
        padded = functional.pad(x.T, (num_taps - 1, 0))[None]
        plain = functional.conv1d(padded, weight[:, None], bias, groups=53)[0].T
        expected = functional.silu(plain) if activation == "swish" else plain
        assert relative_error(output, expected) < (1e-6 if dtype == torch.float32 else 1e-2)
    again = run(allocated(CpuMixing(specs)), steps_of(random.Random(3), LENGTHS), inputs)
    assert all(map(torch.equal, own, again))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bits_depend_on_no_company_chunks_and_threads(kind: str, seed: int) -> None:
    inputs = [drawn(kind, length, number) for number, length in enumerate(LENGTHS)]
    specs = [inputs[0].spec]
    whole = run(allocated(CpuMixing(specs)), [[(slot, 0, length)] for slot, length in enumerate(LENGTHS)], inputs)
    with torch_threads(1 + seed % 2):
        pieces = run(allocated(CpuMixing(specs)), steps_of(random.Random(seed), LENGTHS), inputs)
    assert all(map(torch.equal, whole, pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_spans_continue_from_states_that_others_left(kind: str) -> None:
    """A span leaves a state after each of its last tokens; any of them may be continued, also twice."""
    inputs = drawn(kind, 40)
    for mixing in (CpuMixing([inputs.spec]), ReferenceMixing([inputs.spec], CPU)):
        allocated(mixing, 6)

        def step(mixing: MixingBackend, *spans: Span) -> torch.Tensor:
            mixing.begin_step(RaggedBatch.from_plan(StepPlan(spans, ()), 16, CPU))
            mixing.begin_pass()
            return mixing.recur(laid_out([(inputs, span.start, span.end) for span in spans]))

        whole = step(mixing, Span(0, 0, 0, [0] * 40, 1, 40, states=((40, 5),)))
        first = step(mixing, Span(0, 0, 0, [0] * 30, 1, 40, states=((10, 2), (29, 0), (30, 3))))
        rest = step(
            mixing,
            Span(0, 0, 10, [0] * 30, 1, 40, state=2, states=((30, 4),)),
            Span(1, 1, 30, [0] * 10, 1, 40, state=3, states=((10, 3),)),
            Span(2, 2, 29, [0] * 11, 1, 40, state=0, states=((11, 1),)),
        )
        expected = torch.cat([whole[10:], whole[30:], whole[29:]])
        if isinstance(mixing, CpuMixing):
            assert torch.equal(first, whole[:30])
            assert torch.equal(rest, expected)
        else:
            assert relative_error(rest, expected) < 1e-6
        ends = [torch.cat([each.flatten() for each in mixing.memory_of(state)]) for state in (1, 3, 4, 5)]
        assert all(relative_error(each, ends[-1]) < 1e-6 for each in ends)


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_tokens_leave_no_trace(kind: str) -> None:
    """A span goes on from the one before it in the step, and keeps nothing, as for draft tokens."""
    inputs = drawn(kind, 40)
    states = torch.zeros(2, CpuMixing([inputs.spec]).bytes_per_state // 4)
    step = torch.ops.inflight.new_mixer_step()
    mixer = torch.ops.inflight.new_mixer(step, states)
    tensors = [getattr(inputs, name) for name in (*ROWS, "skip", "rates")]

    def recur(*spans: tuple[int, int, int, int]) -> torch.Tensor:
        torch.ops.inflight.begin_mixing(step, torch.tensor(spans))
        options = inputs.is_delta, inputs.normalizes, inputs.scale, inputs.dtype
        output: torch.Tensor = torch.ops.inflight.recur(*tensors, *options, mixer)
        return output

    whole, after = recur((0, 40, -1, 0)), states[0].clone()
    in_parts = recur((0, 30, -1, 0), (30, 36, -2, -1), (36, 40, -2, -1))
    assert torch.equal(in_parts, whole), "dropped tokens see those before them"
    kept = states[0].clone()
    recur((0, 30, -1, 1), (30, 40, -1, -1))
    assert torch.equal(states[1], kept)
    recur((0, 30, -1, 1), (30, 40, -2, 0))
    assert torch.equal(states[0], after)
    assert torch.equal(states[1], kept), "a state may be kept on the way"
    for delete, number in ((torch.ops.inflight.delete_mixer, mixer), (torch.ops.inflight.delete_mixer_step, step)):
        delete(number)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (((0, 3, -2, 0),), "there is no span before"),
        (((0, 3, -1, 0), (4, 5, -1, 1)), "is wrong"),
        (((0, 3, -3, 0),), "is wrong"),
        (((0, 3, -1, 2),), "a state beyond"),
        (((0, 9, -1, 0),), "9 tokens"),
    ],
)
def test_wrong_steps_are_refused(spans: Any, reason: str) -> None:
    step = torch.ops.inflight.new_mixer_step()
    mixer = torch.ops.inflight.new_mixer(step, torch.zeros(2, 3 * 5))

    def run_step() -> None:
        torch.ops.inflight.begin_mixing(step, torch.tensor(spans))
        torch.ops.inflight.convolve(torch.zeros(8, 5), torch.zeros(5, 4), None, "none", mixer)

    with pytest.raises(RuntimeError, match=reason):
        run_step()


def test_another_order_of_operators_is_refused() -> None:
    mixing = allocated(CpuMixing([MixerSpec(False, (3, 5))]), 1)
    mixing.begin_step(batch_of((0, 0, 4)))
    mixing.begin_pass()
    with pytest.raises(RuntimeError, match="in another way than at load"):
        mixing.recur(drawn("mamba 2", 4))
    assert mixing.num_missing == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus", "silu"])
def test_elementwise_functions_are_torchs_at_any_place(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 2001), torch.tensor([0.0, -0.0, 1e-8, -1e-8, 80.0, -86.0])]).to(dtype)
    function = getattr(torch.ops.aten, name)
    exact, plain = function(x.double()), function(x)
    with BatchInvariantElementwise():
        own = function(x)
    error = ((own.double() - exact).abs() / exact.abs().clamp(min=1e-37)).max()
    assert error <= max(4e-7, 1.01 * float(((plain.double() - exact).abs() / exact.abs().clamp(min=1e-37)).max()))
    rows = x[:70].view(7, 10)
    with BatchInvariantElementwise():
        whole = function(rows)
        assert all(torch.equal(function(rows[i:].contiguous())[0], whole[i]) for i in range(7))
        assert torch.equal(function(rows.T.contiguous().T), whole)
