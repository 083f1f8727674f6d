"""Our kernel runs all experts of a mixture at once and gives the results of one expert after the other."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from inflight import LLM, SamplingParams
from inflight.census.tiny_configs import model_class, tiny_config
from inflight.execution.grouped.rounding import Rounding
from inflight.execution.kernels import has_panels, kernels_available
from inflight.execution.preparation.agreement import relative_error
from inflight.execution.preparation.packed_proof import routers_keep_bits
from inflight.execution.weights.caught_matrices import CaughtMatrix
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.formats import INT8, PLAIN, WeightFormat, find_format
from tests import zoo
from tests.execution import this_cpu

NUM_TOKENS = 40
FAST = find_format(None, "fast")
STORED = {"int8": torch.int8}
"""What the weights of a format are stored in."""


def mixture(name: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> Any:
    model = copy.deepcopy(zoo.build(name)).to(dtype)
    return next(module for module in model.modules() if hasattr(module, "_apply_gate"))


def tokens(module: Any, dtype: torch.dtype, num_chosen: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[T, hidden]` and the experts of each; no token chooses the last expert."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_TOKENS, module.gate_up_proj.shape[-1], generator=generator).to(dtype)
    scores = torch.rand(NUM_TOKENS, module.num_experts - 1, generator=generator)
    return states, scores.topk(num_chosen).indices


@pytest.mark.parametrize(
    ("dtype", "weight_format", "tolerance"),
    [(torch.float32, PLAIN, 1e-6), (torch.bfloat16, PLAIN, 1e-2), (torch.bfloat16, INT8, 5e-2)],
)
def test_each_choice_gives_the_result_of_its_expert(
    dtype: torch.dtype, weight_format: WeightFormat, tolerance: float
) -> None:
    this_cpu.needs(dtype)
    this_cpu.needs(STORED.get(weight_format.name, dtype))
    module = mixture(dtype=dtype)
    states, chosen = tokens(module, dtype)
    expected = []
    for state, experts in zip(states.float(), chosen.tolist(), strict=True):
        for expert in experts:
            gate, up = nn.functional.linear(state, module.gate_up_proj[expert].float()).chunk(2)
            expected.append(nn.functional.linear(nn.functional.silu(gate) * up, module.down_proj[expert].float()))
    prepacked = PrepackedExperts(module, weight_format)
    actual = prepacked.run(module, states, chosen)
    assert actual.dtype == dtype
    assert relative_error(actual, torch.stack(expected)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("weight_format", "rounding"), [(PLAIN, None), (INT8, None), (FAST, Rounding(4)), (FAST, Rounding(8))]
)
def test_a_token_gets_the_same_bits_in_any_batch(
    dtype: torch.dtype, weight_format: WeightFormat, rounding: Rounding | None
) -> None:
    this_cpu.needs(dtype)
    this_cpu.needs(STORED.get(weight_format.name, dtype))
    module = mixture(dtype=dtype)
    if rounding:
        this_cpu.needs(torch.uint8)
        for name in ("gate_up_proj", "down_proj"):
            setattr(module, name, nn.Parameter(rounding.rounded(getattr(module, name).detach(), dtype), False))
    states, chosen = tokens(module, dtype)
    prepacked = PrepackedExperts(module, weight_format)
    together = prepacked.run(module, states, chosen).view(NUM_TOKENS, 2, -1)
    for number in range(0, NUM_TOKENS, 7):
        alone = prepacked.run(module, states[number : number + 1], chosen[number : number + 1])
        assert torch.equal(alone, together[number])


def test_an_expert_that_does_not_exist_contributes_nothing() -> None:
    module = mixture()
    states, chosen = tokens(module, torch.float32)
    prepacked = PrepackedExperts(module)
    expected = prepacked.run(module, states, chosen)
    chosen[3, 1] = module.num_experts
    actual = prepacked.run(module, states, chosen)
    assert not actual[7].any()
    rest = torch.arange(2 * NUM_TOKENS) != 7
    assert torch.equal(actual[rest], expected[rest])


@pytest.mark.skipif(not has_panels(torch.float32), reason="the kernel is for weights in panels")
@pytest.mark.parametrize(("name", "has_usual_gate"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False)])
def test_experts_run_in_our_kernel_whatever_their_gate_is(name: str, has_usual_gate: bool) -> None:
    model = LLM(zoo.build(name)).engine.runner.model
    mixtures = [each.inflight_experts for each in model.modules() if hasattr(each, "_apply_gate")]
    assert mixtures
    assert all(each.run_in_kernel for each in mixtures)
    assert all((each._activation[0] != "none") == has_usual_gate for each in mixtures)


@pytest.mark.skipif(not has_panels(torch.float32), reason="the kernel is for weights in panels")
def test_a_gate_of_its_own_gives_what_experts_give_one_by_one() -> None:
    """That of gpt-oss, whose biases make every expert give something for a row of zeros."""
    module = mixture("gpt_oss")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_TOKENS, module.gate_up_proj.shape[1], generator=generator)
    chosen = torch.rand(NUM_TOKENS, module.num_experts, generator=generator).topk(2).indices
    chosen[3, 1] = module.num_experts
    prepacked = PrepackedExperts(module)
    actual = prepacked.run(module, states, chosen)
    torch.testing.assert_close(actual, prepacked._run_one_by_one(module, states, chosen))
    assert not actual[7].any()


@pytest.mark.skipif(not has_panels(torch.float32), reason="oneDNN's layers need several rows")
@pytest.mark.parametrize(("name", "min_rows"), [("qwen3_moe", 1), ("mixtral", 1), ("gpt_oss", 1), ("deepseek_v3", 1)])
def test_padding_chooses_no_experts(name: str, min_rows: int) -> None:
    """A step of one token has one row, so it reads the experts that its token chose, and no others."""
    assert LLM(zoo.build(name)).engine.runner.require_packed().min_rows == min_rows


@pytest.mark.parametrize("size", [1, 31, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_are_added_up_by_their_weights(dtype: torch.dtype, size: int) -> None:
    if not kernels_available():
        pytest.skip("the operator is a kernel")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_TOKENS * 3, size, generator=generator).to(dtype)
    weights = torch.rand(3, NUM_TOKENS, generator=generator).T  # not in one piece
    expected = (rows.view(NUM_TOKENS, 3, size).double() * weights[..., None].double()).sum(1)
    together = torch.ops.inflight.weighted_sum(rows, weights)
    torch.testing.assert_close(together, expected.to(dtype))
    alone = [torch.ops.inflight.weighted_sum(rows[3 * i : 3 * i + 3], weights[i : i + 1]) for i in range(NUM_TOKENS)]
    assert torch.equal(torch.cat(alone), together)


def test_a_caught_matrix_multiplies_however_it_is_given() -> None:
    """By name, too, and beside what is not caught."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((96, 64), (5, 64)))
    caught, expected = CaughtMatrix.from_weight(weight), nn.functional.linear(x, weight)
    for given in (nn.functional.linear(x, caught), nn.functional.linear(input=x, weight=caught, bias=None)):
        torch.testing.assert_close(given, expected)
    assert torch.equal(nn.functional.linear(caught, weight[:3]), nn.functional.linear(weight, weight[:3]))
    assert nn.functional.linear(x[:0], caught).shape == (0, 96)


class Router(nn.Module):
    """Gives fewer than four rows another last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = CaughtMatrix.from_weight(torch.eye(8))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden_states, self.weight)
        return logits if len(logits) >= 4 else torch.nextafter(logits, torch.tensor(torch.inf))


def test_a_router_that_computes_few_rows_in_another_way_is_found() -> None:
    model: Any = nn.Sequential(Router())
    x = torch.rand(9, 8)
    assert not routers_keep_bits(model, lambda: model(x), 1)
    assert routers_keep_bits(model, lambda: model(x), 4)


@pytest.mark.parametrize(
    ("model_type", "num_experts"),
    [
        ("qwen2_moe", 8),  # a gate of one output
        ("qwen2_moe", 64),
        ("deepseek_v3", 4),  # sigmoids of narrow rows
        ("deepseek_v3", 16),
        ("kolibri1", 16),  # a sigmoid of the chosen ones
        ("llama4_text", 16),  # experts multiplied as a batch
        ("jetmoe", 8),  # experts that the model runs one by one
        ("longcat_flash", 16),  # and a router that it never calls
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.thorough("float32-qwen2_moe-8", "float32-deepseek_v3-4", "float32-llama4", "bfloat16-deepseek_v3-16")
def test_mixtures_give_the_same_bits_in_any_company(model_type: str, num_experts: int, dtype: torch.dtype) -> None:
    config = tiny_config(model_type)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, name):
            setattr(config, name, num_experts)
    torch.manual_seed(0)
    model = model_class(model_type)(config).eval().to(dtype)
    llm = LLM(model, block_size=4, num_blocks=600, max_num_batched_tokens=256, enable_prefix_caching=False)
    assert llm.model_info.is_batch_invariant
    assert llm.model_info.is_recorded or model_type in ("jetmoe", "longcat_flash", "llama4_text")
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 100) for _ in range(length)] for length in (3, 17, 40, 9, 64, 1, 23, 130, 33)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)

    def scores(prompts: list[list[int]]) -> list[Any]:
        return [output.outputs[0].logprobs for output in llm.generate(prompts, params, use_tqdm=False)]

    together = scores(prompts)
    assert [scores([prompt])[0] for prompt in prompts] == together
