"""Layers of four bits compute what their definition says, in any batch and for any size of group."""

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.engine.engine import Engine
from inflight.execution.weights.formats import int4
from inflight.execution.weights.formats.int4 import dequantised, panels_of, round_weight
from inflight.execution.weights.tied_embedding import PrepackedEmbedding
from tests import zoo
from tests.execution import this_cpu

SHAPES = [(64, 64), (300, 96), (33, 40), (70, 33), (16, 700)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _cpu() -> None:
    this_cpu.needs(torch.uint8)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: `[T, in]` times numbers `[out, groups, group]` and their scales."""
    num_groups, group = numbers.shape[1:]
    padded = torch.nn.functional.pad(x.float(), (0, num_groups * group - x.shape[1])).view(len(x), num_groups, group)
    largest = padded.abs().amax(dim=-1, keepdim=True)
    x_scales = largest / 127
    inverse = torch.full_like(largest, 127) / largest  # `127 / largest` would be rounded twice
    rounded = (padded.double() * inverse.double()).nan_to_num(0).round()
    sums = torch.einsum("tgi,ogi->tog", rounded.double(), numbers.double() - int4.MIDDLE)
    return (sums * scales.double() * x_scales.double().transpose(1, 2)).sum(dim=-1)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_what_the_definition_says(shape: tuple[int, int], dtype: torch.dtype, group: int) -> None:
    num_outputs, num_inputs = shape
    num_groups = -(-num_inputs // group)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (num_outputs, num_groups, group), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_groups, generator=generator).half()
    bias = drawn(num_outputs).to(dtype)
    number = torch.ops.inflight.new_linear(
        panels_of(numbers, scales), bias, None, num_inputs, num_outputs, "none", "none"
    )
    try:
        for num_rows in (1, 2, 6, 7, 13, 150):
            x = drawn(num_rows, num_inputs, seed=num_rows).to(dtype)
            actual = torch.ops.inflight.linear(x, number, num_outputs)
            expected = product(x, numbers, scales) + bias.double()
            assert actual.dtype == dtype
            error = (actual.double() - expected).norm() / expected.norm()
            assert error < (1e-6 if dtype == torch.float32 else 5e-3)
    finally:
        torch.ops.inflight.delete_linear(number)


def test_a_weight_that_four_bits_can_hold_keeps_its_values() -> None:
    numbers = torch.randint(0, 16, (50, 3, int4.GROUP), dtype=torch.uint8)
    numbers[..., 0] = 0  # the largest
    weight = dequantised(numbers, torch.rand(50, 3).half() + 0.1, 90)
    assert torch.equal(dequantised(*round_weight(weight), 90), weight)
    assert not dequantised(*round_weight(torch.zeros(4, 90)), 90).any()


def test_a_scale_is_chosen_with_the_least_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(64, 512)
    chosen = (dequantised(*round_weight(weight), 512) - weight).norm()
    monkeypatch.setattr(int4, "SHARES", (1.0,))
    assert chosen < 0.98 * (dequantised(*round_weight(weight), 512) - weight).norm()


def test_a_model_in_four_bits_is_close_and_reads_its_embedding_out_of_the_head() -> None:
    prompt, greedy = "Once upon a time", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llm = LLM(quantization="int4")
    assert llm.model_info.quantization == "int4"
    assert isinstance(llm.engine.runner.model.get_input_embeddings(), PrepackedEmbedding)
    scores = [
        [next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[1:] if each]
        for output in (one.generate(prompt, greedy, use_tqdm=False)[0] for one in (llm, LLM()))
    ]
    assert len(scores[0]) == len(scores[1]) > 1
    assert scores[0] == pytest.approx(scores[1], abs=1.0)


def test_without_its_instructions_four_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "has_panels", lambda dtype: False)
    with pytest.raises(ModelError, match="quantization 'int4' needs a CPU with AVX-512 VNNI"):
        Engine(zoo.build("llama"), EngineConfig(num_blocks=20, quantization="int4"))
