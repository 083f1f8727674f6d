"""Weights in groups: what they stand for, and that both arithmetics compute what their definitions say."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from torch.nn import functional

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.engine.engine import Engine
from inflight.execution.grouped import weight as weights
from inflight.execution.grouped.rounding import Rounding, channels_of, rounded_channels
from inflight.execution.grouped.weight import CHUNK, GroupedLayout, GroupedWeight, Groups
from inflight.execution.hf import gguf_model
from inflight.execution.hf.gguf_lattice import LATTICES
from inflight.execution.hf.gguf_model import packed_blocks
from inflight.execution.kernels import has_panels
from inflight.execution.preparation import prepare as preparation
from inflight.execution.preparation.prepare import prepare
from inflight.execution.weights.formats import PLAIN, find_format
from inflight.execution.weights.grouped_linear import ExactGroupedLinear, GroupedLinear, supports_int8_activations
from inflight.execution.weights.int8_linear import int8_layer
from inflight.execution.weights.prepacked_linear import PrepackedEmbedding
from inflight.execution.weights.rounded_model import round_weights
from tests import zoo
from tests.execution import this_cpu
from tests.gguf.files import random_blocks, tiny

DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = {
    "a scale for 32": GroupedLayout(4, 32, middle=8),
    "a scale for 64": GroupedLayout(4, 64, middle=8),
    "a scale for 128": GroupedLayout(4, 128, middle=7),
    "a minimum": GroupedLayout(4, 64, has_minima=True),
    "eight bits": GroupedLayout(8, 128, middle=128),
    "eight bits, a minimum": GroupedLayout(8, 32, has_minima=True),
    "fine scales": GroupedLayout(4, 256, fine=1, has_minima=True),
    "two fine scales": GroupedLayout(6, 256, fine=2, middle=32),
    "a wide scale": GroupedLayout(4, 128, middle=8, has_wide_scales=True),
    "a wide minimum": GroupedLayout(8, 64, has_minima=True, has_wide_scales=True),
    "floats of eight bits": GroupedLayout(8, 128, has_wide_scales=True, code="e4m3"),
    "floats of four bits": GroupedLayout(4, 32, middle=12, code="e2m1"),
    "nonlinear": GroupedLayout(4, 256, fine=1, middle=128, code="nonlinear"),
    "two bits": GroupedLayout(2, 256, middle=1),
    "two bits, a minimum": GroupedLayout(2, 64, has_minima=True, has_wide_scales=True),
    "two bits, two fine minima": GroupedLayout(2, 256, fine=2, has_minima=True),
    "three bits": GroupedLayout(3, 128, middle=4),
    "three bits, a minimum": GroupedLayout(3, 32, has_minima=True, has_wide_scales=True),
    "three bits, two fine scales": GroupedLayout(3, 256, fine=2, middle=4),
    "a lattice": GroupedLayout(4, 256, fine=2, middle=64, has_wide_scales=True, code="lattice2"),
    "another lattice": GroupedLayout(4, 256, fine=1, middle=64, code="lattice3"),
    "odd numbers": GroupedLayout(4, 256, fine=1, middle=16, code="odd"),
}
SHAPES = [(64, 64), (300, 96), (33, 40), (70, 33), (16, 700)]


@pytest.fixture(autouse=True)
def _cpu() -> None:
    this_cpu.needs(torch.uint8)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_groups(layout: GroupedLayout, shape: tuple[int, int], *, in_another_order: bool = False) -> Groups:
    generator = torch.Generator().manual_seed(1)
    num_outputs, num_inputs = shape
    num_runs, num_chunks = -(-num_inputs // layout.coarse), -(-num_inputs // CHUNK)

    def whole(number: int) -> torch.Tensor:
        return torch.randint(-100, 100, (num_outputs, number), generator=generator, dtype=torch.int8)

    def scales() -> torch.Tensor:
        drawn = torch.rand(num_outputs, num_runs, generator=generator).half()
        return drawn.float() / 2**20 if layout.has_wide_scales else drawn

    numbers = torch.randint(0, 1 << layout.bits, shape, generator=generator, dtype=torch.uint8)
    if layout.code == "e4m3":
        numbers[numbers & 127 == 127] = 126  # NaN
    return Groups(
        layout,
        numbers,
        scales(),
        whole(num_chunks * layout.fine) if layout.fine else None,
        scales() if layout.has_minima else None,
        whole(num_chunks * layout.fine) if layout.has_minima and layout.fine else None,
        order=torch.randperm(num_inputs, generator=generator) if in_another_order else None,
    )


def grouped(groups: Groups, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    return GroupedWeight.from_groups("test", [groups], dtype, is_stacked=False)


# ------------------------------------------------------------------------------------------- what they stand for


@pytest.mark.parametrize("kind", [*gguf_model.LAYOUTS, *LATTICES])
def test_a_type_of_gguf_is_taken_apart_without_loss(kind: str) -> None:
    blocks = random_blocks(kind, 70, 1280)
    expected = torch.from_numpy(gguf.dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType[kind]).copy())
    rows = torch.randperm(70)
    halves = blocks[:30], blocks[30:].clone()
    layout, matrix = packed_blocks(kind, halves, torch.stack([(rows + 1) * (rows < 30), (rows - 29).clamp(0)]))
    for dtype in (torch.float32, torch.bfloat16):
        weight = GroupedWeight(kind, layout, [matrix], expected.shape, dtype)
        assert torch.equal(weight.values(), expected[rows].to(dtype))


def test_scales_that_are_not_finite_are_refused() -> None:
    rows = torch.arange(1, 34)[None]
    for kind, place in (("Q4_K", 1), ("Q4_K", 3), ("Q6_K", 209), ("MXFP4", 0), ("IQ2_S", 1)):
        blocks = random_blocks(kind, 33, 1280)
        packed_blocks(kind, [blocks], rows)
        blocks[32, -1, place] = 255
        with pytest.raises(RuntimeError, match="some scales are not finite"):
            packed_blocks(kind, [blocks], rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_panels_hold_every_weight(layout: GroupedLayout, shape: tuple[int, int]) -> None:
    groups = random_groups(layout, shape)
    weight = grouped(groups)
    assert torch.equal(weight.values(), groups.values())
    numbers = torch.randint(0, shape[0], (3, 5))
    assert torch.equal(weight.stored_rows.rows(numbers), groups.values()[numbers])


@pytest.mark.parametrize("kind", [GroupedLinear, ExactGroupedLinear])
def test_inputs_may_lie_in_another_order(kind: type[GroupedLinear]) -> None:
    groups = random_groups(LAYOUTS["a scale for 64"], (70, 96), in_another_order=True)
    weight, straight = grouped(groups), grouped(replace(groups, order=None))
    assert groups.order is not None
    places = groups.order.argsort()
    assert torch.equal(groups.values(), straight.values()[:, places])
    assert torch.equal(weight.values(), groups.values())
    numbers = torch.tensor([[3, 0]])
    assert torch.equal(weight.stored_rows.rows(numbers), groups.values()[numbers])
    x = drawn(5, 96)
    assert torch.equal(kind(weight, None)(x), kind(straight, None)(x[:, groups.order]))
    above = grouped(replace(groups, numbers=groups.numbers[:64], coarse=groups.coarse[:64]))
    assert isinstance(torch.cat([above, weight]), GroupedWeight)
    assert not isinstance(torch.cat([above, straight]), GroupedWeight)


def test_a_grouped_weight_is_a_parameter_like_any_other() -> None:
    groups = [random_groups(LAYOUTS["a minimum"], (64, 96)) for _ in range(3)]
    one, several = grouped(groups[0]), GroupedWeight.from_groups("test", groups, torch.float32, is_stacked=True)
    values, stacked = groups[0].values(), torch.stack([each.values() for each in groups])
    parameter = nn.Parameter(one, requires_grad=False)
    x = drawn(5, 96)
    with torch.inference_mode():
        assert torch.equal(functional.linear(x, parameter), functional.linear(x, values))
        assert torch.equal(functional.linear(x, several[1]), functional.linear(x, stacked[1]))
        assert torch.equal(functional.embedding(torch.tensor([[3, 0]]), parameter), values[torch.tensor([[3, 0]])])
        assert torch.equal(several.sum(), stacked.sum())
        assert torch.equal(x @ one.T, x @ values.T)
    for kept, expected in [
        (parameter.data, values),
        (one.T, values.T),
        (one.mT.mT, values),
        (one.to(torch.bfloat16), values.bfloat16()),
        (several.transpose(1, 2), stacked.mT),
        (several[2], stacked[2]),
        (list(several)[1], stacked[1]),
        (torch.cat([one, one]), torch.cat([values, values])),
        (torch.stack([one, one]), torch.stack([values, values])),
        (torch.stack([one.T, one.T]), torch.stack([values.T, values.T])),
        (torch.cat([several, several], dim=1), torch.cat([stacked, stacked], dim=1)),
        (torch.cat([several.mT, several.mT], dim=-1), torch.cat([stacked.mT, stacked.mT], dim=-1)),
    ]:
        assert isinstance(kept, GroupedWeight)
        assert kept.shape == expected.shape
        assert torch.equal(kept.values(), expected)
    assert not isinstance(torch.cat([one, values]), GroupedWeight)
    assert not isinstance(torch.cat([several, several]), GroupedWeight)
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        one.mul_(2)
    assert not isinstance(torch.cat([grouped(random_groups(LAYOUTS["a minimum"], (33, 96)))] * 2), GroupedWeight)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("in_another_order", [False, True])
def test_a_part_of_a_weight_keeps_its_numbers_where_whole_groups_come_into_it(
    layout: GroupedLayout, in_another_order: bool
) -> None:
    """Elsewhere it is expanded: half of 300 outputs is no number of whole panels, half of 704 inputs none of runs."""
    for shape, dim in (((128, 1024), 0), ((64, 1024), 1), ((300, 256), 0), ((64, 704), 1)):
        weight = grouped(random_groups(layout, shape, in_another_order=in_another_order))
        step = (CHUNK, layout.coarse)[dim]
        keeps = shape[dim] // 2 % step == 0 and not (dim == 1 and in_another_order)
        for given, along in ((weight, dim), (weight.mT, 1 - dim), (torch.stack([weight, weight]), dim + 1)):
            for part, expected in zip(given.chunk(2, along), given.values().chunk(2, along), strict=True):
                assert isinstance(part, GroupedWeight) == keeps
                assert torch.equal(part.values() if isinstance(part, GroupedWeight) else part, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_a_kernel_multiplies_with_the_same_values(dtype: torch.dtype) -> None:
    weight = grouped(random_groups(LAYOUTS["a minimum"], (70, 96)), dtype)
    x, bias = drawn(2, 5, 96).to(dtype), drawn(70).to(dtype)
    expected = functional.linear(x, weight, bias), x @ weight.T
    with torch.inference_mode(), weights.watch_expansions() as expanded, weights.multiplied_in_place():
        actual = functional.linear(x, weight, bias), x @ weight.T
    assert not expanded
    torch.testing.assert_close(actual, expected)
    assert torch.equal(functional.linear(x, weight, bias), expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_weight_is_expanded_piece_by_piece(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bias = random_groups(LAYOUTS["a scale for 64"], (100, 96)), drawn(100).to(dtype)
    x = drawn(2, 3, 96).to(dtype)
    weight, values = grouped(groups, dtype), groups.values().to(dtype)
    monkeypatch.setattr(weights, "BYTES_AT_ONCE", 1)
    with torch.inference_mode(), weights.watch_expansions() as expanded:
        torch.testing.assert_close(functional.linear(x, weight, bias), functional.linear(x, values, bias))
        torch.testing.assert_close(x @ weight.T, x @ values.T)
    assert not expanded
    torch.testing.assert_close(x[0] @ weight.T, x[0] @ values.T)


# ------------------------------------------------------------------------------------------------ the arithmetics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_exact_arithmetic_gives_the_bits_of_a_plain_layer(
    layout: GroupedLayout, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    this_cpu.needs(dtype)
    groups, bias = random_groups(layout, shape), drawn(shape[0]).to(dtype)
    layer = ExactGroupedLinear(grouped(groups, dtype), bias, "gelu", "tanh")
    plain = PLAIN.prepack_linear(groups.values().to(dtype), bias, "gelu", "tanh")
    for num_rows in (1, 7, 8, 150):
        x = drawn(num_rows, shape[1], seed=num_rows).to(dtype)
        actual, expected = layer(x), plain(x)
        assert actual.dtype == dtype
        if has_panels(dtype):
            assert torch.equal(actual, expected)
        else:
            error = (actual.double() - expected.double()).norm() / expected.double().norm()
            assert error < (1e-6 if dtype == torch.float32 else 5e-3)


def rounded_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition of the fast arithmetic, in float64: `[T, in]` times `[out, in]`."""
    missing = -x.shape[1] % CHUNK
    chunks = functional.pad(x.float(), (0, missing)).view(len(x), -1, CHUNK)
    largest = chunks.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # `127 / largest` would be rounded twice
    rounded = (chunks.double() * inverse.double()).nan_to_num(0).round() * (largest / 127).double()
    return rounded.flatten(1)[:, : x.shape[1]] @ weight.double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_fast_arithmetic_computes_what_its_definition_says(
    layout: GroupedLayout, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if not supports_int8_activations():
        pytest.skip("this CPU does not multiply whole numbers")
    groups, bias = random_groups(layout, shape), drawn(shape[0]).to(dtype)
    layer = GroupedLinear(grouped(groups, dtype), bias)
    if layer.is_exact:
        pytest.skip("floats have no fast arithmetic")
    for num_rows in (1, 2, 6, 7, 13, 150):
        x = drawn(num_rows, shape[1], seed=num_rows).to(dtype)
        expected = rounded_product(x, groups.values()) + bias.double()
        error = (layer(x).double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("kind", [GroupedLinear, ExactGroupedLinear])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_row_gets_the_same_bits_in_any_batch(
    layout: GroupedLayout, dtype: torch.dtype, kind: type[GroupedLinear]
) -> None:
    this_cpu.needs(dtype)
    layer = kind(grouped(random_groups(layout, (70, 320)), dtype), None)
    x = drawn(200, 320).to(dtype)
    together = layer(x)
    for first, last in ((0, 1), (3, 5), (60, 69), (100, 117), (7, 200)):
        assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("kind", [GroupedLinear, ExactGroupedLinear])
def test_non_finite_values_stay_within_their_row(kind: type[GroupedLinear]) -> None:
    layer = kind(grouped(random_groups(LAYOUTS["a minimum"], (64, 64))), None)
    x = drawn(3, 64)
    expected = layer(x)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 7] = bad
        actual = layer(broken)
        assert not actual[1].isfinite().any()
        assert torch.equal(actual[[0, 2]], expected[[0, 2]])


# -------------------------------------------------------------------------------------------------------- rounding

FOUR_BITS = [Rounding(4, group, has_minima) for group in (32, 64, 128) for has_minima in (False, True)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rounding", FOUR_BITS, ids=str)
def test_a_weight_that_four_bits_can_hold_keeps_its_values(rounding: Rounding, dtype: torch.dtype) -> None:
    layout = GroupedLayout(4, rounding.group, has_minima=rounding.has_minima, middle=0 if rounding.has_minima else 8)
    groups = random_groups(layout, (50, 160))
    groups.coarse[:] = 2.0 ** -drawn(*groups.coarse.shape).abs().round()
    if groups.coarse_minima is not None:
        groups.coarse_minima[:] = 4 * groups.coarse
        groups.numbers[:, 1::32] = 15
    groups.numbers[:, ::32] = 0  # the least, or the furthest from the middle
    weight = groups.values().to(dtype)
    assert torch.equal(rounding.rounded(weight, torch.float32).values(), weight.float())
    assert not rounding.rounded(torch.zeros(4, 90), torch.float32).values().any()
    assert rounding.rounded(torch.full((4, 90), torch.nan), torch.float32).values().isnan().all()


@pytest.mark.parametrize("rounding", FOUR_BITS, ids=str)
def test_a_scale_is_chosen_with_the_least_error(rounding: Rounding) -> None:
    """Better than the scale that reaches the largest weight, and minima are better than none."""
    weight = drawn(64, 512)
    parts = weight.view(64, -1, rounding.group)
    if rounding.has_minima:
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        naive = ((parts - low) / (high - low) * 15).round() * (high - low) / 15 + low
    else:
        largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)) / -8
        naive = (parts / largest).round().clamp(-8, 7) * largest
    error = (rounding.rounded(weight, torch.float32).values() - weight).norm()
    assert error < 0.99 * (naive.flatten(1) - weight).norm()
    if rounding.has_minima:
        symmetric = replace(rounding, has_minima=False)
        assert error < 0.98 * (symmetric.rounded(weight, torch.float32).values() - weight).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits_by_channels_run_as_int8_layers(shape: tuple[int, int]) -> None:
    this_cpu.needs(torch.int8)
    weight, x = drawn(*shape), drawn(5, shape[1])
    rounded = Rounding(8).rounded(weight, torch.float32)
    numbers, scales = rounded_channels(weight)
    assert torch.equal(rounded.values(), numbers * scales[:, None])
    assert all(map(torch.equal, channels_of(rounded), (numbers, scales)))
    fast = find_format(None, "fast").prepack_linear(rounded, None)
    assert isinstance(fast, int8_layer())
    assert torch.equal(fast(x), int8_layer()(weight, None)(x))
    exact, plain = (PLAIN.prepack_linear(each, None)(x) for each in (rounded, rounded.values()))
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4)


def test_every_linear_layer_and_expert_is_rounded_and_no_router() -> None:
    model = copy.deepcopy(zoo.build("qwen3_moe"))
    told = []
    round_weights(model, Rounding(4), torch.float32, told=lambda name, before, after: told.append(name))
    for name, parameter in model.named_parameters():
        is_rounded = isinstance(parameter.data, GroupedWeight)
        assert is_rounded == (name in told)
        is_end = name in ("lm_head.weight", "model.embed_tokens.weight")
        assert is_rounded == (name.endswith("proj.weight") or "experts" in name or is_end), name
        if is_rounded:
            assert parameter.data.kind == ("int8" if is_end else "int4")


def test_only_a_number_of_experts_makes_a_router() -> None:
    """The shared expert is as wide as a size whose name speaks of experts."""
    model = tiny(
        "qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96
    )
    assert model.config.shared_expert_intermediate_size == model.model.layers[0].mlp.shared_expert.up_proj.out_features
    round_weights(model, Rounding(4), torch.float32)
    shared = model.model.layers[0].mlp.shared_expert
    assert all(isinstance(each.weight.data, GroupedWeight) for each in (shared.gate_proj, shared.up_proj))


def test_a_model_of_another_dtype_is_rounded_from_its_files(tmp_path: Path) -> None:
    """Not from what they are after a conversion."""
    model = copy.deepcopy(zoo.build("llama")).to(torch.float16)
    model.save_pretrained(tmp_path)
    own = prepare(tmp_path, EngineConfig(dtype="float32", quantization="int4", num_blocks=20)).model
    assert own.model.norm.weight.dtype == torch.float32
    layer = own.model.layers[0].mlp.down_proj
    expected = Rounding(4).rounded(model.model.layers[0].mlp.down_proj.weight.detach(), torch.float32)
    assert isinstance(layer, GroupedLinear)
    assert torch.equal(layer.prepacked, expected.matrices[0].panels)


@pytest.mark.parametrize("arithmetic", ["fast", "exact"])
def test_a_model_in_four_bits_is_close_and_reads_its_embedding_out_of_the_head(arithmetic: str) -> None:
    prompt, greedy = "Once upon a time", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llm = LLM(quantization="int4", quantization_arithmetic=arithmetic)
    assert llm.model_info.quantization == "int4"
    assert isinstance(llm.engine.runner.model.get_input_embeddings(), PrepackedEmbedding)
    scores = [
        [next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[1:] if each]
        for output in (one.generate(prompt, greedy, use_tqdm=False)[0] for one in (llm, LLM()))
    ]
    assert len(scores[0]) == len(scores[1]) > 1
    assert scores[0] == pytest.approx(scores[1], abs=1.0)


def test_without_kernels_four_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "can_group", lambda: False)
    with pytest.raises(ModelError, match="quantization 'int4' needs a C\\+\\+ compiler"):
        Engine(zoo.build("llama"), EngineConfig(num_blocks=20, quantization="int4"))


@pytest.mark.parametrize("options", [{"quantization": "int8", "quantization_arithmetic": "exact"}])
def test_int8_has_no_exact_arithmetic(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'int8' rounds activations"):
        EngineConfig(**options)
